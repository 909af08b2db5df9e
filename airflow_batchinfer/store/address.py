"""Which addresses a store can have."""

from __future__ import annotations

_SCHEMES = frozenset({"s3", "file"})


def address_problem(uri: str) -> str | None:
    """Why no store can be at an address; none if one can. A path has no scheme.

    Without this `gs://bucket` would be a folder called `gs:` on the machine that writes.
    """
    scheme, mark, _ = uri.partition("://")
    if not mark or scheme in _SCHEMES:
        return None
    return (
        f"`{scheme}://` is no store: give a local path or `s3://bucket/prefix` (stores of other clouds that "
        "speak S3 too are reached with `endpoint_url` in `storage_options`)"
    )
