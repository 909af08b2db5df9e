"""Input files of any content: the rows that plain Python reads, or an error that names the file."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.pipeline.readers import open_input
from airflow_batchinfer.spec import InputSpec
from tests.unit.fuzz.damage import NASTY, damaged, fuzzed

# The parsers hold the interpreter, so nothing but a thread can end one that hangs.
pytestmark = [pytest.mark.airflow_env, pytest.mark.timeout(600, method="thread")]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NAME = st.one_of(st.sampled_from(["a", "A", "b", 'x"y', "p.q", "$", "*", "e\\f", "[0]"]), TEXT.filter(bool))
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.floats(),
    st.sampled_from([2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**20, 0.1, -0.0, 5e-324, 1.7e308]),
    st.sampled_from(["2020-01-01", "1", "true", "NaN", "null", "{}", "[1]", "\0", "\u2028"]),
    TEXT,
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAME | TEXT, inner, max_size=3)),
    max_leaves=6,
)
ROWS = [
    {"id": f"k{i}", "text": f'é "{i}", 😀', "n": i, "o": {"a": [i, None]}, "m": i if i % 2 else "s"}
    for i in range(8)
]

csv.field_size_limit(1 << 24)  # of Python's reader; damage repeats long pieces


def read(path: Path) -> list[dict[str, Any]] | None:
    """All rows with all columns; none if the file is refused by name. Nothing else may come out."""
    try:
        reader = open_input(InputSpec(path=str(path)), path.parent)
        batches = list(reader.batches(reader.schema.names))
    except InputError as error:
        message = str(error)
    else:
        table = pa.Table.from_batches(batches, schema=reader.schema)
        table.validate(full=True)
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    assert str(path) in message
    return None


def same(found: Any, written: Any) -> bool:
    """Whether a value was read for what it is: as itself, or as its JSON text."""
    if not isinstance(found, str) or found == written:
        return _equal(found, written)
    try:
        return _equal(_json(found), written)
    except ValueError:
        return False


class _AmbiguousError(Exception):
    """A JSON object has a name twice, with values of two kinds: RFC 8259 leaves open which one counts."""


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(reversed(pairs))
    if any(type(fields[name]) is not type(value) for name, value in pairs):
        raise _AmbiguousError
    return fields


def _json(text: str) -> Any:
    """JSON as this package reads it: a key that stands twice counts the first time.

    Numbers too long for Python's integers stay their digits.
    """
    return json.loads(
        text,
        object_pairs_hook=_first_of_each,
        parse_int=lambda digits: int(digits) if len(digits) < 1000 else digits,
    )


def _equal(found: Any, written: Any) -> bool:
    """Equal but for keys that only other rows' objects have, which are null."""
    match found, written:
        case ((bool() | None | str()), _):
            return type(found) is type(written) and bool(found == written)
        case ((int() | float()), (int() | float())) if not isinstance(written, bool):
            return found == written or (math.isnan(found) and math.isnan(written))
        case list(), list():
            return len(found) == len(written) and all(map(same, found, written))
        case dict(), dict():
            extra = [found[key] for key in found.keys() - written.keys()]
            return not any(v is not None for v in extra) and all(
                same(found.get(key), value) for key, value in written.items()
            )
    return False


def assert_same_rows(found: list[dict[str, Any]], written: list[dict[str, Any]]) -> None:
    """Each row has its own values; names that cannot be columns are left out."""
    assert len(found) == len(written)
    for row, values in zip(found, written, strict=True):
        assert all(same(row.get(name), v) for name, v in values.items() if name and "\0" not in name)
        assert all(row[name] is None for name in row.keys() - values.keys())


@fuzzed(30)
@given(
    rows=st.lists(st.dictionaries(NAME, VALUE, min_size=1, max_size=3), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    start=st.sampled_from(["", "\ufeff"]),
    ascii_only=st.booleans(),
)
@example(rows=[{"o": {"a": 1}}, {"o": {"b": 2}}], end="\n", start="", ascii_only=True)
@example(rows=[{"o": {"a": 1, "A": 2}}, {"o": {"": 3}}], end="\n", start="", ascii_only=True)
@example(rows=[{"o": [2**64 - 1]}, {"o": [10**25, -0.5]}], end="\r\n", start="\ufeff", ascii_only=True)
@example(rows=[{"o": {"a": "x"}}, {"o": {"a": 1}}, {"o": {}}], end="\n\n", start="", ascii_only=False)
def test_json_lines_are_read_as_python_reads_them(
    rows: list[dict[str, Any]], end: str, start: str, ascii_only: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        text = start + "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows)
        path.write_text(text, encoding="utf-8", newline="")
        found = read(path)
    assert found is not None
    assert_same_rows(found, rows)


@fuzzed(30)
@given(
    names=st.lists(NAME.map(lambda n: f"c{n}"), min_size=2, max_size=4, unique_by=lambda n: n.strip()),
    cells=st.lists(st.lists(TEXT, min_size=4, max_size=4), min_size=1, max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    start=st.sampled_from(["", "\ufeff"]),
)
@example(names=["c|", "d"], cells=[[",", '",', ',"', '","']], end="\n", start="")
def test_csv_is_read_as_python_reads_it(
    names: list[str], cells: list[list[str]], end: str, start: str
) -> None:
    lines = [names, *(line[: len(names)] for line in cells)]
    suffix, delimiter = ("tsv", "\t") if any(c in "".join(names) for c in ";|\t") else ("csv", ",")
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator=end).writerows(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{suffix}")
        path.write_text(start + text.getvalue(), encoding="utf-8", newline="")
        found = read(path)
    assert found == [dict(zip(names, line, strict=True)) for line in lines[1:]]


def _json_lines() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    columns = [{name: value for name, value in row.items() if name != "m"} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(columns), sink)
    return bytes(sink.getvalue())


_CSV = "".join(f'k{i},"é ""{i}""",{i}\r\n' for i in range(8)).encode()
_NO_ORACLE = ("a.jsonl.zst", "a.parquet")
"""Python has no Zstandard of its own, and nothing covers a Parquet page's bytes unless its writer says so."""

FILES = {
    "a.jsonl": _json_lines(),
    "a.jsonl.gz": gzip.compress(_json_lines(), mtime=0),
    "a.jsonl.zst": _zstd(_json_lines()),
    "a.csv": b"id,text,n\r\n" + _CSV,
    "a.csv.gz": gzip.compress(b"id;text;n\n" + _CSV.replace(b",", b";"), mtime=0),
    "a.parquet": _parquet(),
}


def _decompressed(name: str, data: bytes) -> bytes:
    """What a file holds. Raises what Python raises where it is damaged or not whole."""
    if not name.endswith(".gz"):
        return data
    whole = b""
    while data:
        member = zlib.decompressobj(wbits=31)
        whole += member.decompress(data)
        if not member.eof:
            raise EOFError("the file ends within a member")
        data = member.unused_data.lstrip(b"\0")
    return whole


def _python_rows(name: str, data: bytes) -> list[dict[str, Any]]:
    """A text file's rows as plain Python reads them. Raises what Python raises if it cannot."""
    # Half a character on either side of a closing quotation mark may be a whole one to another reader of CSV.
    errors = "surrogateescape" if ".csv" in name else "strict"
    text = _decompressed(name, data).decode("utf-8", errors).removeprefix("\ufeff")
    if ".jsonl" in name:
        return [_json(line) for line in text.split("\n") if line.strip(" \t\r")]
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    header, *lines = [
        line for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if line
    ]
    return [dict(zip(header, line, strict=True)) for line in lines]


_LEFT_TO_READERS = ("incorrect data check", "incorrect length check", "unknown header flags set")
"""What zlib says of a gzip member that DuckDB reads: it compares nothing that stands at the end, and minds no
flag of the header that RFC 1952 reserves."""


def assert_as_python_reads_it(path: Path, data: bytes) -> None:
    """The file's rows are those that plain Python finds in it, or it is refused by name."""
    path.write_bytes(data)
    found = read(path)
    if found is None:
        return
    try:
        written = _python_rows(path.name, data)
    except _AmbiguousError:
        return
    except csv.Error as error:
        if "expected after" in str(error):
            return  # what stands behind a closing quotation mark, each reader takes as it likes
        raise
    except zlib.error as error:
        if any(words in str(error) for words in _LEFT_TO_READERS):
            return
        raise
    assert_same_rows(found, written)


@pytest.mark.parametrize("name", FILES)
@fuzzed(20)
@given(data=st.data())
def test_a_damaged_file_is_read_as_it_is_or_refused_by_name(name: str, data: st.DataObject) -> None:
    injured = data.draw(damaged(FILES[name]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        if name in _NO_ORACLE:
            path.write_bytes(injured)
            read(path)
        else:
            assert_as_python_reads_it(path, injured)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_a_flipped_bit_of_a_gzip_header_changes_no_row(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / name, FILES[name]
    path.write_bytes(data)
    whole = read(path)
    for at, bit in itertools.product(range(10), range(8)):
        flipped = bytes([data[at] ^ (1 << bit)])
        assert_as_python_reads_it(path, data[:at] + flipped + data[at + 1 :])
        assert read(path) in (None, whole), (at, bit)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("a.jsonl", "a.csv")])
def test_no_file_that_is_cut_off_passes_for_whole(tmp_path: Path, name: str) -> None:
    for end in range(len(FILES[name])):
        (tmp_path / name).write_bytes(FILES[name][:end])
        assert read(tmp_path / name) is None, end


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz"])
def test_a_compressed_file_in_several_members_is_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    once = read(path)
    assert once
    compress = gzip.compress if name.endswith(".gz") else _zstd
    lines = _decompressed("a.gz", FILES[name]).splitlines(keepends=True) if name.endswith(".gz") else None
    pieces = [compress(line) for line in lines or _json_lines().splitlines(keepends=True)]
    path.write_bytes(b"".join(pieces))
    assert read(path) == once


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("piece", NASTY, ids=lambda piece: repr(piece[:12]))
def test_no_piece_upsets_a_reader(tmp_path: Path, name: str, piece: bytes) -> None:
    path = tmp_path / name
    for data in (
        piece,
        b'{"t":"a"}\n' + piece + b"\n",
        b'{"t":' + piece + b"}\n",
        b't,u\n"' + piece + b'",1\n',
    ):
        assert_as_python_reads_it(path, data)


def test_a_flipped_bit_in_a_page_with_a_checksum_is_noticed(tmp_path: Path) -> None:
    """Spark's and our own writers put them into each page; without one, what is well formed is read."""
    path = tmp_path / "a.parquet"
    table = pa.table({"n": range(50), "text": [f"text {i}" for i in range(50)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    written = path.read_bytes()
    footer = int.from_bytes(written[-8:-4], "little") + 8
    for at in range(4, len(written) - footer):
        path.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
        assert read(path) in (None, table.to_pylist()), at


@pytest.mark.parametrize("columns", ["t", "t,u"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_quotation_mark_that_is_never_closed_swallows_no_record(
    tmp_path: Path, columns: str, end: str
) -> None:
    path = tmp_path / "a.csv"
    record = ",".join(["x"] * len(columns.split(",")))
    path.write_text(f"{columns}\n{record}\n{record}{end}", newline="")
    assert read(path) == [dict.fromkeys(columns.split(","), "x")] * 2
    path.write_text(f'{columns}\n{record[:-1]}"x\n{record}\n{record}{end}', newline="")
    assert read(path) is None
    with pytest.raises(InputError, match="never closed, in the record that begins with 'x"):
        list(open_input(InputSpec(path=str(path)), tmp_path).batches(["t"]))


def test_a_line_of_null_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for text in ("null\n", '{"t": 1}\nnull\n', 'null\n{"t": 1}\n'):
        path.write_text(text)
        assert read(path) is None


def test_parquet_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["one", "two"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    written = path.read_bytes()
    assert written.count(b"two") == 1
    assert read(path) == table.to_pylist()
    path.write_bytes(written.replace(b"two", b"t\xffo"))
    assert read(path) is None
