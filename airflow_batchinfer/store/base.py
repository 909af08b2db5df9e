"""`Store`: the folder that holds plans, shards, parts and tables.

Keys are relative, with `/`. A write is atomic: a reader sees the whole object or none. Nothing else
is asked of a store: no locks, no conditional writes, no renames, no appends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow.fs


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: its key, its size in bytes, and when it was last written (Unix seconds)."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Objects under one root. All methods raise `StoreError` naming the key and the operation."""

    uri: str
    """The root: an absolute local path, or `s3://bucket/prefix`."""

    def read_bytes(self, key: str) -> bytes:
        """The whole object. Raises `FileNotFoundError` if there is none."""
        ...

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write (or replace) an object, durably and at once."""
        ...

    def put_file(self, source: Path, key: str) -> None:
        """Move a finished local file into the store; for objects too big for `write_bytes`."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        ...

    def info(self, key: str) -> ObjectInfo | None:
        """The object's size and age; none if it is not there."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with the folder `prefix`, at any depth, sorted by key."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Keys of the folders that stand in the folder `prefix`, sorted; what is in them is not listed."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        ...

    def remove_unfinished(self, prefix: str, older_than: timedelta, *, dry_run: bool = False) -> int:
        """Remove what killed writers left half-written: no reader sees it, but it takes up space.

        Args:
            prefix: folder, as for `list`.
            older_than: what was begun later than this ago may still be in the making and is left alone.
            dry_run: only count.

        Returns:
            How many half-written objects were removed, or would be.
        """
        ...

    def filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """Arrow's file system for bulk reads, and the root's path on it."""
        ...

    def uri_of(self, key: str) -> str:
        """The full address of a key, for people and for engines that take a URI."""
        ...

    def delta_options(self) -> dict[str, str]:
        """`storage_options` with which `deltalake` opens a table here: they hold credentials.

        Hand them on at once; never store, log or return them to Airflow. Empty for local.
        """
        ...

    def options(self) -> dict[str, str]:
        """Non-secret options with which `open_store` gives this store again (empty for local)."""
        ...
