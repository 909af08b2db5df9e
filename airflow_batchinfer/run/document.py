"""Small JSON documents in the store: read with a clear error, written atomically.

A document ends with the release that wrote it, and with the SHA-256 of all that stands before, so that a
flipped byte is noticed even where the JSON still fits. One that is whole and does not fit is another
release's, which is not to be taken for damage. One without these two lines, written by hand or by an older
release, is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from airflow_batchinfer import __version__
from airflow_batchinfer.errors import CorruptError, ReleaseError
from airflow_batchinfer.spec import FROM_STORE
from airflow_batchinfer.store import Store

_END = b"\n}\n"
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
_RELEASE = re.compile(rb',\s*"written_by":\s*"([\w.+-]{1,24})"\s*}\s*\Z')
"""Not as strict as the seal: who changes a document by hand may lay it out anew. A release's name is short:
an end of the seal's digits, which a cut through both lines leaves in its place, is none."""


def _checked_time(text: str) -> str:
    if text and datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


Timestamp = Annotated[str, AfterValidator(_checked_time)]
"""A time with its zone, ISO 8601; empty if it is not known."""


FormatVersion = Literal[1]
"""Counted up by a release that gives the fields of a document another meaning: older ones refuse it then."""


class Document(BaseModel):
    """Base of plan, commit, progress, ledger and the rest: frozen, nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Indented JSON, UTF-8, with the release that wrote it and its seal."""
        body = (self.model_dump_json(indent=1, by_alias=True) + "\n").encode()
        body = body.removesuffix(_END) + f',\n "written_by": "{__version__}"'.encode() + _END
        seal = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"'
        return body.removesuffix(_END) + seal.encode() + _END

    def digest(self) -> str:
        """SHA-256 of the content, hex.

        Fields at their default are left out: a release that adds one gives the same digest, and what was
        published from this document stays current.
        """
        return hashlib.sha256(self.model_dump_json(by_alias=True, exclude_defaults=True).encode()).hexdigest()

    def write(self, store: Store, key: str) -> None:
        """Write atomically under `key`."""
        store.write_bytes(key, self.to_bytes())

    @classmethod
    def read(cls, store: Store, key: str) -> Self:
        """Read what `write` wrote.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptError: it is not JSON of this document, or not what was written, naming the object.
            ReleaseError: it is what was written, by a release that has other documents.
        """
        stored = _Stored.of(store.read_bytes(key))
        try:
            document = cls.model_validate_json(stored.body, context=FROM_STORE)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}"
            if stored.sealed and stored.whole:
                raise ReleaseError(
                    f"{store.uri_of(key)} is whole, but {written_elsewhere(stored.release)} ({problem})"
                ) from error
            raise CorruptError(f"{store.uri_of(key)} is damaged: {problem}") from error
        if not stored.whole:
            raise CorruptError(
                f"{store.uri_of(key)} is damaged: its SHA-256 is not the one it ends with (who changed it by "
                "hand on purpose removes the line `sha256`)"
            )
        return document

    @staticmethod
    def read_fields(store: Store, key: str) -> dict[str, Any]:
        """What stands in a document, as its writer wrote it, whichever release that was.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptError: it is no JSON object, or not what was written.
        """
        stored = _Stored.of(store.read_bytes(key))
        try:
            fields = json.loads(stored.body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not stored.whole:
            raise CorruptError(f"{store.uri_of(key)} is damaged: it is not the document that was written")
        return fields

    @classmethod
    def find(cls, store: Store, key: str) -> Self | None:
        """The same as `read`; none if there is no such object. Raises `UnreadableError`."""
        try:
            return cls.read(store, key)
        except FileNotFoundError:
            return None


def written_elsewhere(release: str | None) -> str:
    """What is wrong with an object of another release, and what to do; none if it does not say which."""
    writer = "another release" if release is None else f"airflow_batchinfer {release}"
    return (
        f"was written by {writer}, and this is {__version__}, which does not understand it: run Airflow and "
        "the workers with the same release, see docs/upgrading.md"
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A document's bytes, taken apart."""

    body: bytes
    """Its JSON, without the lines that every document ends with."""
    release: str | None
    sealed: bool
    whole: bool
    """Whether it is what its seal is of; of one without a seal, nobody can say otherwise."""

    @classmethod
    def of(cls, data: bytes) -> Self:
        seal = _SEAL.search(data)
        body = data if seal is None else data[: seal.start()] + _END
        whole = seal is None or seal[1].decode() == hashlib.sha256(body).hexdigest()
        release = _RELEASE.search(body)
        if release is not None:
            body = body[: release.start()] + _END
        name = None if release is None else release[1].decode("utf-8", "replace")
        return cls(body, name, seal is not None, whole)
