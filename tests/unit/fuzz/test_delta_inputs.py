"""A Delta table as input, with any one of its files damaged or gone: the table's rows, or an error naming it.

A commit of Delta's log has no checksum, and neither has a page of Parquet as most writers leave it. So
damage that leaves a file well formed may be read as it stands; it is never another exception.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.fuzz.damage import NASTY, damaged, flipped, fuzzed
from tests.unit.fuzz.test_inputs import read

pytestmark = [pytest.mark.airflow_env, pytest.mark.timeout(600, method="thread")]

ROWS: list[dict[str, Any]] = [
    {"id": i, "text": f'é "{i}"', "part": "ab"[i % 2], "deep": {"a": [i, None]}} for i in range(12)
]
WHOLE = [row | {"extra": None} for row in ROWS]
NEWEST = "_delta_log/00000000000000000003.json"
"""The commit after the checkpoint; it brought the rows from the seventh on."""

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partitioned table in four commits, one of them a delete, with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    table = pa.Table.from_pylist(ROWS)
    write_deltalake(folder, table.slice(0, 6), partition_by=["part"])
    _settle(folder, 0)
    write_deltalake(
        folder,
        table.slice(0, 3).append_column("extra", pa.array([1, 2, 3])),
        mode="append",
        schema_mode="merge",
    )
    _settle(folder, 1)
    DeltaTable(folder).delete("extra is not null")
    _settle(folder, 2)
    DeltaTable(folder).create_checkpoint()
    write_deltalake(folder, table.slice(6), mode="append", schema_mode="merge")
    _settle(folder, 3)
    return folder


def _settle(table: Path, version: int) -> None:
    """Give a commit, and the files that it adds, names, times and an order that are the same in each run."""
    commit = table / f"_delta_log/{version:020}.json"
    text = commit.read_text()
    for path in re.findall(r'"add":{"path":"([^"]+)"', text):
        name = f"{Path(path).parent}/{version}.parquet"
        (table / path).rename(table / name)
        text = text.replace(path, name)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(UUID(int=0)), text)
    text = re.sub(r"\b\d{13}\b", "4102444800000", text)  # the year 2100: no tombstone has expired
    text = re.sub(r"(_ms\W+)\d+", r"\g<1>0", text)
    commit.write_text("".join(sorted(f"{_ordered(line)}\n" for line in text.splitlines())))


def _ordered(text: str) -> str:
    """JSON, and the JSON that a text in it is, with its names in order."""

    def inner(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: _ordered(v) if k == "stats" else inner(v) for k, v in value.items()}
        return value

    return json.dumps(inner(json.loads(text)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _files(made: Path, *, checkpointed: bool = True) -> Files:
    """By name; without its checkpoint, the log is read from the start."""
    found = {str(p.relative_to(made)): p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if checkpointed or "checkpoint" not in name}


def _read(files: Files) -> list[dict[str, Any]] | None:
    """The rows by id; none if the table is refused by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "_delta_log").mkdir()
        for key, data in files.items():
            (folder / key).parent.mkdir(exist_ok=True)
            (folder / key).write_bytes(data)
        return read(folder)


def _right(found: list[dict[str, Any]] | None) -> bool:
    return found is None or sorted(found, key=lambda row: row["id"]) == WHOLE


@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_table_as_it_was_made(made: Path, checkpointed: bool) -> None:
    found = _read(_files(made, checkpointed=checkpointed))
    assert found is not None
    assert _right(found)


def test_without_one_of_its_files_it_is_refused_or_whole(made: Path) -> None:
    files = _files(made)
    for gone in files:
        found = _read({name: data for name, data in files.items() if name != gone})
        if gone == NEWEST:  # then it is a table that never had these rows
            found = found and found + WHOLE[6:]
        assert _right(found), gone


@pytest.mark.parametrize("piece", [b"\0", b"garbage", b"PAR1" * 10, b"[]\n", b'{"add":{}}\n', *NASTY[-4:]])
def test_no_piece_in_place_of_a_file_upsets_the_reader(made: Path, piece: bytes) -> None:
    files = _files(made)
    for name in files:
        assert _right(_read(files | {name: piece})), name


@pytest.mark.parametrize("name", [b"x" * 300, b"part=a/3.parquet/x", b"", b"part=a", b"no\\u0000name"])
def test_a_path_that_no_file_can_have_is_damage(made: Path, name: bytes) -> None:
    files = _files(made)
    assert files[NEWEST].count(b"part=a/3.parquet") == 1
    assert _read(files | {NEWEST: files[NEWEST].replace(b"part=a/3.parquet", name)}) is None


@pytest.mark.parametrize("checkpointed", [True, False])
@fuzzed(60)
@given(data=st.data())
def test_a_table_with_a_file_cut_off_is_whole_or_refused(
    made: Path, checkpointed: bool, data: st.DataObject
) -> None:
    files = _files(made, checkpointed=checkpointed)
    name = data.draw(st.sampled_from(sorted(files)))
    cut = files[name][: data.draw(st.integers(0, len(files[name]) - 1))]
    # A commit cut off between two lines is a commit with fewer of them: Delta has no way to tell.
    assume(not name.endswith(".json") or _ends_within_a_line(cut))
    assert _right(_read(files | {name: cut})), name


def _ends_within_a_line(commit: bytes) -> bool:
    try:
        json.loads(b"".join(commit.splitlines()[-1:]) or b"{}")
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("checkpointed", [True, False])
@fuzzed(60)
@given(data=st.data())
def test_a_damaged_table_is_read_or_refused_by_name(
    made: Path, checkpointed: bool, data: st.DataObject
) -> None:
    files = _files(made, checkpointed=checkpointed)
    name = data.draw(st.sampled_from(sorted(files)))
    _read(files | {name: data.draw(st.one_of(flipped(files[name]), damaged(files[name])))})
