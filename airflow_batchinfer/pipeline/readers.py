"""Readers: the rows of an input in snapshot order, as Arrow batches of bounded size.

Each reader checks, when it is opened, what can be checked without reading the rows, and raises
`InputError` naming the file (and, for text formats, the line) when it meets what it cannot read.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.pipeline.delta_log import damaged_log_file
from airflow_batchinfer.pipeline.duck import MEMORY_LIMIT, connect_duckdb, sql_name, sql_text
from airflow_batchinfer.pipeline.inputs import FoundFile, FoundTable, find_input
from airflow_batchinfer.pipeline.tables import DELTA_ERRORS, delta_words, open_delta
from airflow_batchinfer.run.parquet import UNREADABLE, batch_rows, rows_at_once
from airflow_batchinfer.run.plan import InputFile
from airflow_batchinfer.spec import InputSpec
from airflow_batchinfer.store.arrow_errors import arrow_reads

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest record of a text format."""

MAX_NESTING = 64
"""Deepest object or list in a JSON line, the line itself included."""

_JSON_ROWS = 2_048
"""Rows in a batch; DuckDB's own vectors have as many."""

_STRUCTURES = 100_000
"""Lines' structures that are remembered, so as not to be merged again and again."""

_CHECKED = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
"""For datasets: pages whose writer gave them a checksum are held against it."""

_NUMBERS = frozenset({"UBIGINT", "BIGINT", "HUGEINT", "DOUBLE"})
"""DuckDB's names of a JSON number's type."""


class Reader(Protocol):
    """An opened input."""

    files: list[InputFile]
    """What it is made of, in order."""
    schema: pa.Schema
    """All its columns."""
    warnings: list[str]
    """What a person should know about how it was read."""
    row_ids: npt.NDArray[np.int64] | None
    """Ids of the rows in order; none where they are ordinals: 0, 1, 2, ..."""
    tracked: tuple[str, ...]
    """Columns that can be read too, as `input_digest` and `change`; none of most inputs."""

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows, in order, with the given columns. May be called again: the rows are the same."""
        ...

    def unchanged(self) -> bool:
        """Whether the input still is what it was when it was opened."""
        ...


def open_input(spec: InputSpec, scratch: Path) -> Reader:
    """Find and open the spec's input.

    Args:
        spec: the spec's `input`.
        scratch: a folder for links to text files, and copies of remote ones.

    Raises:
        InputError: see `find_input` and the readers.
    """
    found = find_input(spec)
    if isinstance(found, FoundTable):
        return DeltaReader(found)
    if found[0].format == "parquet":
        return ParquetReader(found, spec)
    if found[0].format == "csv":
        return CsvReader(found, spec)
    return JsonlReader(found, spec, scratch)


class _Files:
    """What readers of plain files share."""

    row_ids: npt.NDArray[np.int64] | None = None
    tracked: tuple[str, ...] = ()

    def __init__(self, found: list[FoundFile], spec: InputSpec) -> None:
        self._found = found
        self._spec = spec
        self.files = [f.identity for f in found]
        self.warnings: list[str] = []

    def unchanged(self) -> bool:
        """See `Reader.unchanged`."""
        try:
            again = find_input(self._spec)
        except InputError:
            return False
        return not isinstance(again, FoundTable) and [f.identity for f in again] == self.files


class ParquetReader(_Files):
    """Parquet files. The first file's schema is the input's; the others must have the same types."""

    def __init__(self, found: list[FoundFile], spec: InputSpec) -> None:
        super().__init__(found, spec)
        with self._open(found[0]) as first:
            self.schema: pa.Schema = first.schema_arrow.remove_metadata()
        twice = {n for n in self.schema.names if self.schema.names.count(n) > 1}
        if twice:
            raise InputError(f"{self.files[0].uri}: the column `{min(twice)}` is there twice; rename one")

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`. Raises `InputError`, `StoreError` naming what cannot be read."""
        wanted = pa.schema([self.schema.field(c) for c in columns])
        for found in self._found:
            with self._open(found) as file:
                self._check(file.schema_arrow, wanted, found.identity.uri)
                try:
                    with arrow_reads(found.identity.uri):
                        batches = file.iter_batches(batch_rows(file.metadata), columns=list(columns))
                        for batch in _whole(batches, file.metadata):
                            yield batch.select(list(columns)).cast(wanted)
                except UNREADABLE as error:
                    raise InputError(
                        f"{found.identity.uri} is damaged: {_first_line(error)}; write it anew"
                    ) from error

    @contextmanager
    def _open(self, found: FoundFile) -> Iterator[pq.ParquetFile]:
        filesystem, root = found.store.filesystem()
        uri = found.identity.uri
        try:
            with arrow_reads(uri):
                # No pre-buffering: it would hold a whole row group's bytes at once.
                file = pq.ParquetFile(
                    f"{root}/{found.key}",
                    filesystem=filesystem,
                    pre_buffer=False,
                    buffer_size=1024 * 1024,
                    page_checksum_verification=True,
                )
        except UNREADABLE as error:
            raise InputError(
                f"{uri} cannot be read as Parquet: {_first_line(error)}; "
                "write it anew, or set input.format if it is something else"
            ) from error
        with file:
            yield file

    def _check(self, schema: pa.Schema, wanted: pa.Schema, uri: str) -> None:
        for field in wanted:
            if field.name not in schema.names:
                raise InputError(
                    f"{uri} has no column `{field.name}`, which {self.files[0].uri} has; columns: "
                    f"{', '.join(schema.names)}"
                )
            if schema.field(field.name).type != field.type:
                raise InputError(
                    f"{uri}: column `{field.name}` is {schema.field(field.name).type}, but {field.type} in "
                    f"{self.files[0].uri}; give all files the same types"
                )


class DeltaReader:
    """A Delta table at its newest version, which is pinned when it is opened."""

    row_ids: npt.NDArray[np.int64] | None = None
    tracked: tuple[str, ...] = ()

    def __init__(self, found: FoundTable) -> None:
        """Raises `InputError`, `StoreError`."""
        try:
            table = open_delta(found.store, found.uri)
            filesystem, root = found.store.filesystem()
            self._dataset = table.to_pyarrow_dataset(filesystem=pa.fs.SubTreeFileSystem(root, filesystem))
        except (*DELTA_ERRORS, NotImplementedError) as error:
            damaged = damaged_log_file(found.store)
            hint = f"; {damaged} is damaged: restore it, or write the table anew" if damaged else ""
            raise InputError(
                f"{found.uri} cannot be read as a Delta table: {delta_words(error)}{hint}"
            ) from error
        self._fragments = sorted(self._dataset.get_fragments(), key=lambda f: str(f.path))
        self.schema = self._dataset.schema.remove_metadata()
        sizes = pa.table(table.get_add_actions(flatten=True))["size_bytes"]
        total = int(pa.compute.sum(sizes).as_py() or 0)
        self.files = [InputFile(uri=found.uri, size=total, version=str(table.version()))]
        self.warnings: list[str] = []

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`. Raises `InputError`, `StoreError` naming what cannot be read."""
        for listed in self._fragments:
            # Made anew, for it keeps its file's footer once that was read, and there may be 10,000 files.
            fragment = listed.format.make_fragment(
                listed.path, listed.filesystem, listed.partition_expression
            )
            try:
                with arrow_reads(self.files[0].uri):
                    batches = fragment.to_batches(
                        schema=self.schema,
                        columns=list(columns),
                        batch_size=batch_rows(fragment.metadata),
                        batch_readahead=1,
                        fragment_readahead=0,
                        fragment_scan_options=_CHECKED,
                    )
                    yield from _whole(batches, fragment.metadata)
            except UNREADABLE as error:
                raise InputError(
                    f"{self.files[0].uri}: {fragment.path} is damaged, or a vacuum has removed it: "
                    f"{_first_line(error)}; write the table anew"
                ) from error

    def unchanged(self) -> bool:
        """See `Reader.unchanged`."""
        # The version is pinned and a table's files never change; a vacuum shows as a missing file.
        return True


def _whole(batches: Iterable[pa.RecordBatch], metadata: pq.FileMetaData) -> Iterator[pa.RecordBatch]:
    """A Parquet file's batches, none of them damaged and none missing.

    Raises `pyarrow.ArrowInvalid`: a flipped byte may leave text that is no UTF-8, or hide a page.
    """
    rows = 0
    for batch in batches:
        batch.validate(full=True)
        rows += batch.num_rows
        yield batch
    if rows != metadata.num_rows:
        raise pa.ArrowInvalid(f"it says that it has {metadata.num_rows} rows, and {rows} can be read")


class CsvReader(_Files):
    """CSV files with a header line. CSV has no types: every column is text, exactly as written."""

    def __init__(self, found: list[FoundFile], spec: InputSpec) -> None:
        super().__init__(found, spec)
        self._delimiters = [_delimiter(_head(f), f.key) for f in found]
        self._names: list[list[str]] = []
        for file, delimiter in zip(found, self._delimiters, strict=True):
            with self._open(file, delimiter, None) as reader:
                names = reader.schema.names
            twice = {n for n in names if names.count(n) > 1}
            if twice:
                raise InputError(f"{file.identity.uri}: the column `{min(twice)}` is there twice; rename one")
            self._names.append(names)
        self.schema = pa.schema([(name, pa.string()) for name in self._names[0]])

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`. Raises `InputError`, `StoreError` naming what cannot be read."""
        for file, delimiter, names in zip(self._found, self._delimiters, self._names, strict=True):
            uri = file.identity.uri
            for column in columns:
                if column not in names:
                    raise InputError(
                        f"{uri} has no column `{column}`, which {self.files[0].uri} has; "
                        f"columns: {', '.join(names)}"
                    )
            with self._open(file, delimiter, names) as reader:
                try:
                    with arrow_reads(uri):
                        for batch in _without_last_line(reader):
                            yield batch.select(list(columns))
                except UNREADABLE as error:
                    raise InputError(
                        f"{uri} is no good CSV: {_first_line(error)}; correct the line"
                    ) from error

    @contextmanager
    def _open(
        self, file: FoundFile, delimiter: str, names: list[str] | None
    ) -> Iterator[pc_csv.CSVStreamingReader]:
        uri = file.identity.uri
        filesystem, root = file.store.filesystem()
        types = None if names is None else {name: pa.string() for name in names}
        try:
            with (
                arrow_reads(uri),
                filesystem.open_input_stream(f"{root}/{file.key}", compression=file.compression) as stream,
                pc_csv.open_csv(
                    stream if names is None else pa.PythonFile(_WithLastLine(stream, delimiter, len(names))),
                    # Threads would lose the line's number in messages.
                    pc_csv.ReadOptions(use_threads=False, block_size=MAX_LINE_BYTES if names else 1 << 20),
                    pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                    pc_csv.ConvertOptions(column_types=types, strings_can_be_null=False),
                ) as reader,
            ):
                yield reader
        except UNREADABLE as error:
            raise InputError(f"{uri} cannot be read as CSV: {_first_line(error)}") from error


class _WithLastLine(io.RawIOBase):
    """A CSV stream with one more record at its end, of empty cells.

    Arrow takes what a quotation mark opens and nothing closes for a cell, up to the end of the file: then
    this record is in it.
    """

    def __init__(self, stream: pa.NativeFile, delimiter: str, columns: int) -> None:
        self._stream = stream
        self._left = b"\n" + delimiter.join(['""'] * columns).encode() + b"\n"

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        data: bytes = self._stream.read(size)
        if len(data) < size:
            more, self._left = self._left[: size - len(data)], self._left[size - len(data) :]
            data += more
        return data


def _without_last_line(reader: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All records but the one that `_WithLastLine` adds. Raises `pyarrow.ArrowInvalid` if it is not there."""
    held: pa.RecordBatch | None = None
    for batch in reader:
        if batch.num_rows:
            if held is not None:
                yield held
            held = batch
    last = [] if held is None else held.slice(held.num_rows - 1).to_pylist()
    if any(cell for record in last for cell in record.values()):
        start = next(iter(last[0].values()))[:60]
        raise pa.ArrowInvalid(f"a quotation mark is never closed, in the record that begins with {start!r}")
    if held is not None:
        yield held.slice(0, held.num_rows - 1)


class JsonlReader(_Files):
    """JSON lines: one object a line.

    Types are those that hold all values of a column over all files, found by reading everything once.
    Text stays text (nothing is taken for a date). A column whose numbers are too big for 64 bits, whose
    lines disagree about the type, or whose objects have keys that only their case tells apart is read as
    text, digits and all, with a warning. An object's key that stands twice counts once, the first time.
    """

    def __init__(self, found: list[FoundFile], spec: InputSpec, scratch: Path) -> None:
        super().__init__(found, spec)
        self._paths = [_local_file(f, scratch / f"input-{i:06d}") for i, f in enumerate(found)]
        self._lines_read = self._bytes_read = 0
        with self._connect() as connection:
            self._types = self._structure(connection)
            self.schema = self._arrow_schema(connection)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`. Raises `InputError`, `StoreError` naming what cannot be read."""
        wanted = pa.schema([self.schema.field(c) for c in columns])
        rows = rows_at_once(self._bytes_read, self._lines_read, _JSON_ROWS)
        for path, found in zip(self._paths, self._found, strict=True):
            query = f"SELECT {self._select(columns)} FROM {self._lines(path, found)}"
            with self._explained(found, path), self._connect() as connection:
                for batch in connection.sql(query).to_arrow_reader(rows):
                    yield batch.cast(wanted)

    def _connect(self) -> duckdb.DuckDBPyConnection:
        # With two, buffers for the longest lines do not fit into the memory.
        return connect_duckdb(":memory:", {"memory_limit": MEMORY_LIMIT, "threads": 1})

    def _structure(self, connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
        """The merged structure of all lines: a type's name, `[type]`, or `{field: type}`."""
        merged: Any = "NULL"
        for path, found in zip(self._paths, self._found, strict=True):
            with self._explained(found, path):
                structure = self._structure_of(connection, self._lines(path, found))
            if structure is not None:
                merged = _merge(merged, self._checked(structure, found, path))
        if merged == "NULL":
            raise InputError(f"the input has no rows ({len(self.files)} files, first {self.files[0].uri})")
        types: dict[str, Any] = merged
        if not types:
            raise InputError(f"{self.files[0].uri}: no line has a field, so there is nothing to prompt with")
        unusable = [name for name in types if not name or "\0" in name]
        if unusable:
            self.warnings.append(f"input fields that cannot be columns are left out: {unusable}")
        return {
            name: self._exact(connection, name, type_)
            for name, type_ in types.items()
            if name not in unusable
        }

    def _structure_of(self, connection: duckdb.DuckDBPyConnection, lines: str) -> Any:
        """What holds all lines of a file; none if it has no line, or one nested too deeply to tell.

        Line by line, since DuckDB's `json_group_structure` holds on to memory for each row.
        """
        merged: Any = None
        seen: set[bytes] = set()  # digests: of wide lines, the structures themselves would fill the memory
        query = connection.sql(f"SELECT json_structure(json)::VARCHAR, strlen(json) FROM {lines}")
        for batch in query.to_arrow_reader(_JSON_ROWS):
            self._lines_read += batch.num_rows
            self._bytes_read += pc.sum(batch.column(1)).as_py() or 0
            for text in pc.unique(batch.column(0)).to_pylist():
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest in seen:
                    continue
                if len(seen) >= _STRUCTURES:
                    seen.clear()
                seen.add(digest)
                try:
                    line = _open(json.loads(text))
                except RecursionError:
                    return "JSON"
                if line == "NULL":  # a line without an object; inside one, it would fit anything
                    return "JSON"
                merged = line if merged is None else _merge(merged, line)
        return merged

    def _checked(self, structure: Any, found: FoundFile, path: Path) -> dict[str, Any]:
        """A file's structure, of objects. Raises `InputError` naming the line that has another one."""
        if isinstance(structure, dict) and _depth(structure) <= MAX_NESTING:
            return structure
        problem = _bad_line(path, found.compression)
        raise InputError(f"{found.identity.uri}{problem or ' cannot be read as JSON lines'}")

    def _exact(self, connection: duckdb.DuckDBPyConnection, name: str, type_: Any) -> Any:
        """`type_`, or text where numbers would lose digits, lines disagree or keys are too alike."""
        leaves = set(_leaves(type_))
        if type_ == {}:
            return "TEXT"
        if type_ == "JSON":
            self.warnings.append(f"input column `{name}` has values of different types; it is read as text")
            return "TEXT"
        if "JSON" in leaves:
            self.warnings.append(
                f"input column `{name}` has values of different types inside; those are read as JSON text"
            )
        if not _has_plain_keys(type_):
            self.warnings.append(
                f"input column `{name}` has objects whose keys are empty or differ in case alone; it is read "
                "as text"
            )
            return "TEXT"
        if leaves & _NUMBERS and self._loses_digits(connection, name, 16 if "DOUBLE" in leaves else 19):
            self.warnings.append(
                f"input column `{name}` has numbers of more than 15 digits (or beyond 10^308); it is read as "
                "text"
            )
            return "TEXT"
        return type_

    def _loses_digits(self, connection: duckdb.DuckDBPyConnection, name: str, digits: int) -> bool:
        """Whether some number in the column has so many digits, or is too big for a double.

        Numbers inside objects and lists are found by what stands before them; where the like stands in a
        text inside, the answer may be yes in vain.
        """
        exponent = "[eE][+]?0*(30[89]|3[1-9][0-9]|[4-9][0-9]{2}|[0-9]{4,})"
        number = sql_text(f"(^|[:\\[,])-?([0-9]{{{digits},}}|[0-9.]+{exponent})")
        for path, found in zip(self._paths, self._found, strict=True):
            value = f"json_extract(json, {sql_text(_path(name))})::VARCHAR"
            where = f"regexp_matches({value}, {number})"
            query = f"SELECT 1 FROM {self._lines(path, found)} WHERE {where} LIMIT 1"
            if connection.execute(query).fetchall():
                return True
        return False

    def _select(self, columns: Sequence[str]) -> str:
        parts = []
        for name in columns:
            type_, path = self._types[name], sql_text(_path(name))
            if type_ in ("TEXT", "VARCHAR"):
                value = f"json_extract_string(json, {path})"
            else:
                # Not the strict form, which wants every key in every object. Nothing is lost by that: the
                # structure holds all values, and columns whose numbers do not fit are text.
                structure = sql_text(json.dumps(_storable(type_)))
                value = f"from_json(json_extract(json, {path}), {structure})"
            parts.append(f"{value} AS {sql_name(name)}")
        return ", ".join(parts)

    def _arrow_schema(self, connection: duckdb.DuckDBPyConnection) -> pa.Schema:
        if not self._types:  # every line is `{}`
            return pa.schema([])
        query = f"SELECT {self._select(list(self._types))} FROM (SELECT '{{}}'::JSON AS json) LIMIT 0"
        return connection.sql(query).to_arrow_table().schema

    def _lines(self, path: Path, found: FoundFile) -> str:
        compression = found.compression or "none"
        return (
            f"read_ndjson_objects({sql_text(str(path))}, compression={sql_text(compression)}, "
            f"maximum_object_size={MAX_LINE_BYTES})"
        )

    @contextmanager
    def _explained(self, found: FoundFile, path: Path) -> Iterator[None]:
        try:
            yield
        except (duckdb.Error, OSError) as error:  # Arrow's, once lines are streamed
            # DuckDB's own line numbers are not exact.
            problem = _bad_line(path, found.compression)
            problem = problem or f" cannot be read as JSON lines: {_first_line(error)}"
            raise InputError(f"{found.identity.uri}{problem}") from error


def _bad_line(path: Path, compression: str | None) -> str | None:
    """The first bad line's number and what is wrong with it, or what is wrong with the file; or none."""
    number = 0
    try:
        with _open_text(path, compression) as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                problem = _line_problem(line)
                if problem:
                    return f", line {number}: {problem}; correct or remove the line"
    except (*UNREADABLE, EOFError, zlib.error) as error:
        return f" cannot be decompressed after line {number}: {_first_line(error)}; write it anew"
    return None


def _line_problem(line: bytes) -> str | None:
    if not line.strip():
        return None
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES} bytes"
    try:
        value = json.loads(line.decode("utf-8"))
    except RecursionError:
        return f"nested deeper than {MAX_NESTING} levels"
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"not a JSON object but {type(value).__name__}"
    if _depth(value) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING} levels"
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a surrogate pair (such as \\ud800), which is no character"
    return None


def _depth(value: Any) -> int:
    """How deep objects and lists stand in one another."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (dict, list))]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


def _leaves(structure: Any) -> Iterator[str]:
    """Names of the plain types in a structure."""
    if isinstance(structure, (dict, list)):
        for inner in structure.values() if isinstance(structure, dict) else structure:
            yield from _leaves(inner)
    else:
        yield structure


def _has_plain_keys(structure: Any) -> bool:
    """Whether the keys of all objects inside can be a struct's fields: DuckDB ignores their case."""
    if isinstance(structure, list):
        return _has_plain_keys(structure[0])
    if not isinstance(structure, dict):
        return True
    plain = all(key and "\0" not in key for key in structure)
    alike = len({key.lower() for key in structure}) < len(structure)
    return plain and not alike and all(map(_has_plain_keys, structure.values()))


def _open(structure: Any) -> Any:
    """A line's structure with objects that hold nothing as such.

    DuckDB calls them `JSON`, as it does values in a list that disagree: inside lists they stay that.
    """
    if isinstance(structure, dict):
        return {k: _open(v) for k, v in structure.items()}
    return {} if structure == "JSON" else structure


def _merge(one: Any, other: Any) -> Any:
    """The structure that holds values of both."""
    if one == other or other == "NULL":
        return one
    if one == "NULL":
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            k: _merge(one.get(k, "NULL"), other.get(k, "NULL"))
            for k in [*one, *(k for k in other if k not in one)]
        }
    if isinstance(one, list) and isinstance(other, list):
        return [_merge(one[0], other[0])]
    if isinstance(one, str) and isinstance(other, str) and {one, other} <= _NUMBERS:
        return "DOUBLE" if "DOUBLE" in (one, other) else "BIGINT"
    return "JSON"


def _storable(structure: Any) -> Any:
    """The structure with signed integers, and text where nothing is known."""
    if isinstance(structure, dict):
        return {k: _storable(v) for k, v in structure.items()} or "JSON"
    if isinstance(structure, list):
        return [_storable(structure[0])]
    return {"UBIGINT": "BIGINT", "HUGEINT": "BIGINT", "NULL": "VARCHAR", "TEXT": "VARCHAR"}.get(
        structure, structure
    )


def _path(name: str) -> str:
    return '$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _local_file(found: FoundFile, target: Path) -> Path:
    """The file as `target` on local disk: a link, or a copy of a remote one.

    DuckDB takes `*`, `?` and `[` in a path for a pattern, and the file's own name may hold them.
    """
    target.unlink(missing_ok=True)
    if "://" not in found.identity.uri:
        target.symlink_to(found.identity.uri)
        return target
    filesystem, root = found.store.filesystem()
    with (
        arrow_reads(found.identity.uri),
        filesystem.open_input_stream(f"{root}/{found.key}", compression=None) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1024 * 1024)
    return target


def _open_text(path: Path, compression: str | None) -> IO[bytes]:
    if compression == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if compression == "zstd":
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _head(found: FoundFile) -> str:
    """The header line of a CSV file."""
    filesystem, root = found.store.filesystem()
    try:
        with (
            arrow_reads(found.identity.uri),
            filesystem.open_input_stream(f"{root}/{found.key}", compression=found.compression) as stream,
        ):
            head = stream.read(64 * 1024)
    except UNREADABLE as error:
        raise InputError(f"{found.identity.uri} cannot be read as CSV: {_first_line(error)}") from error
    line = io.BytesIO(head).readline().decode("utf-8", "replace").strip("\r\n")
    if not line.strip():
        raise InputError(f"{found.identity.uri} is empty; a CSV file needs a header line")
    return line


def _delimiter(header: str, name: str) -> str:
    """Tab for `.tsv`; else the one of `,`, `;`, tab and `|` that the header has most of."""
    if ".tsv" in name.lower():
        return "\t"
    return max(",;\t|", key=header.count)


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error and str(error).strip() else "unreadable"
