"""`LocalStore`: a folder on a local or shared file system."""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_batchinfer.errors import StoreError
from airflow_batchinfer.store.base import ObjectInfo

if TYPE_CHECKING:
    import pyarrow.fs

_TEMPORARY = ".tmp-"
"""Prefix of half-written files; listings leave them out, a kill leaves them behind."""


class LocalStore:
    """Objects are files; a write goes to a temporary file, is synced, and is renamed into place."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().resolve()
        self.uri = str(self._root)

    def read_bytes(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{path} does not exist") from error
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error

    def write_bytes(self, key: str, data: bytes) -> None:
        with self._replacing(key) as temporary:
            temporary.write_bytes(data)

    def put_file(self, source: Path, key: str) -> None:
        with self._replacing(key) as temporary:
            shutil.move(source, temporary)

    def exists(self, key: str) -> bool:
        return self.info(key) is not None

    def info(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # a plan or a commit that cannot be looked up must not pass for missing
            raise StoreError(f"cannot look up {path}: {error}") from error
        return ObjectInfo(key, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._path(prefix)
        try:
            paths = (path for path in _files(folder) if not path.name.startswith(_TEMPORARY))
            for key in sorted(path.relative_to(self._root).as_posix() for path in paths):
                try:
                    info = (self._root / key).stat()
                except FileNotFoundError:  # deleted since; those behind it are still there
                    continue
                yield ObjectInfo(key, info.st_size, info.st_mtime)
        except OSError as error:
            raise StoreError(f"cannot list {folder}: {error}") from error

    def folders(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix)
        try:
            with os.scandir(folder) as entries:
                # By what their objects' keys begin with, as on S3.
                names = sorted(f"{entry.name}/" for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"cannot list {folder}: {error}") from error
        for name in names:
            yield (folder / name).relative_to(self._root).as_posix()

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete {self._path(key)}: {error}") from error

    def remove_unfinished(self, prefix: str, older_than: timedelta, *, dry_run: bool = False) -> int:
        begun_before = time.time() - older_than.total_seconds()
        folder, found = self._path(prefix), 0
        try:
            for path in _files(folder):
                with suppress(FileNotFoundError):  # its writer has finished it meanwhile
                    if path.name.startswith(_TEMPORARY) and path.stat().st_mtime < begun_before:
                        if not dry_run:
                            path.unlink()
                        found += 1
        except OSError as error:
            raise StoreError(f"cannot remove half-written files under {folder}: {error}") from error
        return found

    def filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem(), str(self._root)

    def uri_of(self, key: str) -> str:
        return str(self._path(key))

    def delta_options(self) -> dict[str, str]:
        return {}

    def options(self) -> dict[str, str]:
        return {}

    def _path(self, key: str) -> Path:
        path = self._root / key
        if not Path(os.path.normpath(path)).is_relative_to(self._root):
            raise StoreError(f"key {key!r} leaves the store {self._root}")
        return path

    @contextmanager
    def _replacing(self, key: str) -> Iterator[Path]:
        """Yield a temporary path beside the key's; make its content durable under the key after."""
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {path}: {error}") from error


def _files(folder: Path) -> Iterator[Path]:
    """Files at any depth, without those that vanish meanwhile.

    Raises:
        OSError: a folder cannot be read: what is in it must not pass for missing.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
