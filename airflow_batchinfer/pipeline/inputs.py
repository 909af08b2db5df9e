"""The input dataset: which files it is made of, what columns it has, and its rows in order.

A row's id is its ordinal in the snapshot: files in order, rows in the order of the file. Every reader
here yields rows in that order, so the caller numbers them by counting.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.run.plan import InputFile
from airflow_batchinfer.spec import InputSpec
from airflow_batchinfer.store import Store, open_store

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
"""File formats by extension."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Compressions by extension, after the format's."""

_GLOB = frozenset("*?[")

_NO_DATA = (".", "_")
"""How names of hidden files and of markers begin."""


@dataclass(frozen=True)
class FoundFile:
    """One input file: its identity, where to read it, and how.

    `store` and `key` address it; `format` is one of `FORMATS`' values, `compression` one of
    `COMPRESSIONS`' or none.
    """

    identity: InputFile
    store: Store
    key: str
    format: str
    compression: str | None


@dataclass(frozen=True)
class FoundTable:
    """A Delta table as input: its folder's address, and a store with the folder as root."""

    uri: str
    store: Store


def find_input(spec: InputSpec) -> list[FoundFile] | FoundTable:
    """Resolve the spec's paths: each a file, a folder, a glob or a Delta table's folder.

    Files keep the order of the spec's list; within a folder or a glob they are sorted by name.

    Raises:
        InputError: nothing there, an extension that says no format, formats that differ, a file named
            twice; always with the path.
    """
    paths = spec.paths
    tables = [p for p in paths if spec.format == "delta" or (spec.format == "auto" and _is_delta(p, spec))]
    if tables:
        if len(paths) > 1:
            raise InputError(f"input.path: {tables[0]} is a Delta table; name it alone, not in a list")
        if not _is_delta(tables[0], spec):
            raise InputError(f"input.path: {tables[0]} is no Delta table: it has no `_delta_log` folder")
        store = open_store(tables[0] if "://" in tables[0] else _local_path(tables[0]), spec.storage_options)
        return FoundTable(store.uri, store)
    found: dict[str, FoundFile] = {}
    for path in paths:
        for file in _files_of(path, spec):
            if file.identity.uri in found:
                raise InputError(f"input.path: {file.identity.uri} is named twice; its rows would be doubled")
            found[file.identity.uri] = file
    formats = {f.format: f.identity.uri for f in found.values()}
    if len(formats) > 1:
        said = ", ".join(f"{name} ({uri})" for name, uri in sorted(formats.items()))
        raise InputError(f"input.path: the files have different formats: {said}; give one job one format")
    return list(found.values())


def check_columns(columns: Iterable[str], have: Sequence[str], asked_by: str) -> None:
    """Refuse columns that the input does not have.

    Raises:
        InputError: names the column, the field that asks for it, the closest name, and all there are.
    """
    for column in columns:
        if column in have:
            continue
        close = difflib.get_close_matches(column, have, n=1) or [
            name for name in have if name.lower() == column.lower()
        ]
        hint = f"did you mean `{close[0]}`? " if close else ""
        shown = ", ".join(have[:50]) + (f" and {len(have) - 50} more" if len(have) > 50 else "")
        raise InputError(
            f"{asked_by} names the column `{column}`, which the input does not have; {hint}columns: {shown}"
        )


def _files_of(path: str, spec: InputSpec) -> list[FoundFile]:
    return _s3_files(path, spec) if path.startswith("s3://") else _local_files(path, spec)


def _local_files(path: str, spec: InputSpec) -> list[FoundFile]:
    local = _local_path(path)
    if os.path.isdir(local):
        candidates = [
            str(p) for p in Path(local).rglob("*") if p.is_file() and _is_data(p.relative_to(local))
        ]
        empty = f"the folder holds no file with a known extension ({_known()})"
    elif os.path.isfile(local):
        candidates, empty = [local], ""
    elif _GLOB & set(local):
        candidates, empty = _local_matches(local), "no file matches"
    else:
        raise InputError(f"input.path: {path} does not exist{_near(Path(local))}")
    single = candidates == [local]
    files = [
        _local_file(p, spec) for p in sorted(candidates) if single or _format_of(p) or spec.format != "auto"
    ]
    if not files:
        raise InputError(
            f"input.path: {path}: {empty or f'no known extension ({_known()}); set input.format'}"
        )
    return files


def _local_matches(pattern: str) -> list[str]:
    """The files that a glob matches, by the same rules as on S3: Python's own take `_x` for data."""
    found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    return [p for p in found if glob_matches(os.path.normpath(pattern), os.path.normpath(p))]


def _local_file(path: str, spec: InputSpec) -> FoundFile:
    try:
        stat = os.stat(path)
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InputError(f"input.path: {path} cannot be read: {error.strerror or error}") from error
    absolute = os.path.abspath(path)
    identity = InputFile(uri=absolute, size=stat.st_size, version=str(stat.st_mtime_ns))
    folder, name = os.path.split(absolute)
    return FoundFile(identity, open_store(folder), name, _format_or_fail(path, spec), _compression_of(path))


def _s3_files(path: str, spec: InputSpec) -> list[FoundFile]:
    bucket, _, key = path.removeprefix("s3://").partition("/")
    store = open_store(f"s3://{bucket}", spec.storage_options)
    folder, globbed = key, bool(_GLOB & set(key))
    if globbed:
        folder = key[: min(key.index(c) for c in _GLOB if c in key)].rpartition("/")[0]
    listed = list(store.list(folder.rstrip("/")))
    if globbed:
        listed = [i for i in listed if i.key == key] or [i for i in listed if glob_matches(key, i.key)]
    elif not listed:
        parent = key.rpartition("/")[0]
        listed = [i for i in store.list(parent) if i.key == key]
    if not listed:
        raise InputError(f"input.path: {path}: there is no such object, folder or match")
    wanted = listed
    if len(listed) > 1 or listed[0].key != key:
        wanted = [i for i in listed if globbed or _is_data(Path(i.key[len(folder) :]))]
        wanted = [i for i in wanted if _format_of(i.key) or spec.format != "auto"]
    files = [
        FoundFile(
            InputFile(uri=f"s3://{bucket}/{i.key}", size=i.size, version=f"{i.modified:.6f}"),
            store,
            i.key,
            _format_or_fail(i.key, spec),
            _compression_of(i.key),
        )
        for i in wanted
    ]
    if not files:
        raise InputError(
            f"input.path: {path}: {len(listed)} objects, none with a known extension ({_known()}) and a name "
            "that begins with neither `.` nor `_`"
        )
    return files


def glob_matches(pattern: str, key: str) -> bool:
    """Whether a name is one of a glob's: only `**` crosses a `/`, and what begins with `.` or `_` is matched
    only where the pattern itself begins so (`_*`)."""
    return _parts_match(pattern.split("/"), key.split("/"))


def _parts_match(patterns: Sequence[str], parts: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**" and _parts_match(patterns[1:], parts):
        return True
    if not parts or (parts[0].startswith(_NO_DATA) and parts[0][0] != patterns[0][:1]):
        return False
    if patterns[0] == "**":
        return _parts_match(patterns, parts[1:])
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _parts_match(patterns[1:], parts[1:])


def _is_delta(path: str, spec: InputSpec) -> bool:
    if path.startswith("s3://"):
        bucket, _, key = path.removeprefix("s3://").partition("/")
        if _GLOB & set(key) or _format_of(key):
            return False
        store = open_store(f"s3://{bucket}", spec.storage_options)
        return next(store.list(f"{key.rstrip('/')}/_delta_log".lstrip("/")), None) is not None
    return os.path.isdir(os.path.join(_local_path(path), "_delta_log"))


def _local_path(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://"))


def _is_data(path: Path) -> bool:
    """Whether no part of the name is hidden or a marker, as Spark and Hive write them."""
    return not any(part.startswith(_NO_DATA) for part in path.parts)


def _format_of(path: str) -> str | None:
    base, extension = os.path.splitext(path.lower())
    if extension in COMPRESSIONS:
        extension = os.path.splitext(base)[1]
    return FORMATS.get(extension)


def _format_or_fail(path: str, spec: InputSpec) -> str:
    format_ = _format_of(path) if spec.format == "auto" else spec.format
    if format_ is None:
        raise InputError(f"input.path: {path}: the extension says no format ({_known()}); set input.format")
    return format_


def _compression_of(path: str) -> str | None:
    return COMPRESSIONS.get(os.path.splitext(path.lower())[1])


def _known() -> str:
    return f"{', '.join(FORMATS)}, also with {' or '.join(COMPRESSIONS)}"


def _near(path: Path) -> str:
    """What stands where the path was expected, for the message."""
    if not path.parent.is_dir():
        return f"; neither does the folder {path.parent}"
    close = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
