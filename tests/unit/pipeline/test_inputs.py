"""What split reads, and what it refuses before any engine starts."""

from __future__ import annotations

import gzip
import json
import os
import posixpath
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_batchinfer.errors import BatchInferError, InputError, StoreError
from airflow_batchinfer.pipeline.answers import shards_of
from airflow_batchinfer.pipeline.inputs import find_input, glob_matches
from airflow_batchinfer.pipeline.labels import LabelCounter
from airflow_batchinfer.pipeline.readers import open_input
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import InputSpec
from airflow_batchinfer.store import Store, open_store
from tests.unit.pipeline.runs import commit_run, frozen_rows, job, write_input

pytestmark = pytest.mark.airflow_env

ROWS = [{"id": f"k{i}", "text": f"text {i}", "label": "x"} for i in range(20)]


def texts_by_id(store: Store, plan: Plan) -> list[str]:
    rows = sorted(frozen_rows(store, plan), key=lambda r: r["row_id"])
    assert [r["row_id"] for r in rows] == list(range(len(rows)))
    return [r["input"]["text"] for r in rows]


def fails(folder: Path, *words: str, error: type[BatchInferError] = InputError, **fields: Any) -> str:
    spec = job(folder, **fields)
    with pytest.raises(error) as caught:
        split(open_store(spec.store), spec, "r")
    message = str(caught.value)
    for word in words:
        assert word in message
    assert not list(Path(spec.store).rglob("plan.json"))
    return message


@pytest.mark.parametrize(
    ("name", "path"),
    [("a.parquet", "in/a.parquet"), ("sub/b.parquet", "in"), ("x/c.parquet", "in/**/*.parquet")],
)
def test_a_file_a_folder_and_a_glob(tmp_path: Path, store: Store, name: str, path: str) -> None:
    write_input(tmp_path, ROWS, name)
    (tmp_path / "in" / "_SUCCESS").touch()
    plan = split(store, job(tmp_path, input={"path": str(tmp_path / path)}), "r")
    assert texts_by_id(store, plan) == [r["text"] for r in ROWS]


@pytest.mark.parametrize(
    "pattern",
    [
        *("*.parquet", "*/*.parquet", "**/*.parquet", "x/**", "**/y/*", "x/*/[ab]?.parquet", "x*", "**"),
        *("_*", "_m/*.parquet", "x/_*/*", "**/_b.parquet", "[._]*", "./x//*.parquet"),
    ],
)
def test_globs_mean_the_same_on_s3(tmp_path: Path, pattern: str) -> None:
    names = ["a.parquet", "x/a.parquet", "x/y/b1.parquet", "x/y/c1.parquet", "x/y/z/b1.parquet", "xa.parquet"]
    names += [
        "_a.parquet",
        ".a.parquet",
        "_m/a.parquet",
        "x/_m/a.parquet",
        "x/y/_b.parquet",
        "x/_m/_b.parquet",
    ]
    for name in names:
        write_input(tmp_path, ROWS[:1], name)
    folder = tmp_path / "in"
    matching = [n for n in names if glob_matches(posixpath.normpath(pattern), n)]
    if not matching:
        with pytest.raises(InputError, match="no file matches"):
            find_input(InputSpec(path=f"{folder}/{pattern}"))
        return
    found = find_input(InputSpec(path=f"{folder}/{pattern}"))
    assert isinstance(found, list)
    assert sorted(f.identity.uri for f in found) == sorted(f"{folder}/{n}" for n in matching)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("*.parquet", ["a.parquet"]),
        ("_*", ["_a.parquet"]),
        ("**/*.parquet", ["a.parquet", "x/b.parquet"]),
        ("x/_*/*.parquet", ["x/_m/c.parquet"]),
    ],
)
def test_a_glob_takes_hidden_files_and_markers_only_if_it_says_so(pattern: str, taken: list[str]) -> None:
    names = ["a.parquet", "_a.parquet", ".a.parquet", "x/b.parquet", "x/_m/c.parquet"]
    assert [n for n in names if glob_matches(pattern, n)] == taken


def test_row_ids_count_through_a_list_of_files_in_its_order(tmp_path: Path, store: Store) -> None:
    paths = [str(write_input(tmp_path, ROWS[i : i + 5], f"{9 - i}.parquet")) for i in (0, 5, 10, 15)]
    plan = split(store, job(tmp_path, input={"path": paths}), "r")
    assert texts_by_id(store, plan) == [r["text"] for r in ROWS]
    assert [f.uri for f in plan.input.files] == paths


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson.zst", "a.csv", "a.csv.gz", "a.tsv"])
def test_text_formats_also_compressed(tmp_path: Path, store: Store, name: str) -> None:
    if "json" in name:
        text = "".join(json.dumps(r) + "\n" for r in ROWS)
    else:
        tab = "\t" if "tsv" in name else ","
        text = "\n".join(tab.join(r) for r in [("id", "text", "label"), *(tuple(r.values()) for r in ROWS)])
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(text.encode())
    else:
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    plan = split(store, job(tmp_path, input={"path": str(path), "id_column": "id"}), "r")
    assert texts_by_id(store, plan) == [r["text"] for r in ROWS]


def test_jsonl_names_are_no_patterns(tmp_path: Path, store: Store) -> None:
    names = ["data1.jsonl", "data?.jsonl", "data[1].jsonl", "sub*/back\\slash[1].jsonl", "sub2/x.jsonl"]
    for name in names:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    plan = split(store, job(tmp_path), "r")
    assert sorted(texts_by_id(store, plan)) == sorted(names)


def test_jsonl_keeps_text_numbers_and_nested_values(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    huge = "123456789012345678901234567890"
    lines = [
        '{"text": "2020-01-01", "n": 1, "big": 1, "mixed": 1, "deep": {"a": [1, 2]}}',
        '{"text": "nul \\u0000 emoji \\ud83d\\ude00 שלום", "n": 2.5, "big": ' + huge + ', "mixed": "x"}',
        "",
        '{"n": null, "text": "007", "mixed": {"b": 1}}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    template = "{{ text }}{{ n }}{{ big }}{{ mixed }}{{ deep }}"
    plan = split(store, job(tmp_path, prompt={"template": template}), "r")
    rows = [r["input"] for r in sorted(frozen_rows(store, plan), key=lambda r: r["row_id"])]
    assert [r["text"] for r in rows] == ["2020-01-01", "nul \0 emoji 😀 שלום", "007"]
    assert [r["n"] for r in rows] == [1.0, 2.5, None]
    assert [r["big"] for r in rows] == ["1", huge, None]
    assert [r["mixed"] for r in rows] == ["1", "x", '{"b": 1}'.replace(" ", "")]
    assert [r["deep"] for r in rows] == [{"a": [1, 2]}, None, None]
    assert any("`big`" in w for w in plan.warnings)


def test_jsonl_of_any_size_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for i in range(60_000):
            more = {
                f"field_{i % 7}": i,
                "list": [{}] if i % 3 else [{"a": i}],
                "object": {} if i % 2 else {"b": i},
            }
            file.write(json.dumps({"id": i, "text": f"{i} " * 120} | more) + "\n")
    reader = open_input(InputSpec(path=str(path)), tmp_path)
    assert sum(batch.num_rows for batch in reader.batches(["text"])) == 60_000
    assert reader.schema.field("id").type == pa.int64()
    assert reader.schema.field("object").type == pa.struct({"b": pa.int64()})


def test_jsonl_of_which_no_two_lines_are_alike_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "unlike.jsonl"
    with path.open("w") as file:
        for i in range(20_000):
            bits = {f"{'field' * 20}{b}": b if i >> b & 1 else None for b in range(15)}
            file.write(json.dumps({"text": "x"} | bits) + "\n")
    tracemalloc.start()
    try:
        reader = open_input(InputSpec(path=str(path)), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(reader.schema) == 16
    assert peak < 20_000_000  # the structures themselves are 40 MB


def test_jsonl_of_long_lines_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        for i in range(200):
            file.write(json.dumps({"id": i, "text": "x" * 2_000_000}) + "\n")
    reader = open_input(InputSpec(path=str(path)), tmp_path)
    assert max(batch.num_rows for batch in reader.batches(["id", "text"])) < 10


def test_csv_is_text_as_written(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "in" / "a.csv"
    path.parent.mkdir()
    path.write_text('id;text\n007;"a ""quoted""; two\nlines"\n1e5;\n', encoding="utf-8")
    plan = split(store, job(tmp_path, input={"path": str(path), "id_column": "id"}), "r")
    rows = sorted(frozen_rows(store, plan), key=lambda r: r["row_id"])
    assert [(r["custom_id"], r["input"]["text"]) for r in rows] == [
        ("007", 'a "quoted"; two\nlines'),
        ("1e5", ""),
    ]


def test_delta_table_at_a_version(tmp_path: Path, store: Store) -> None:
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "in", pa.Table.from_pylist(ROWS[:10]))
    write_deltalake(tmp_path / "in", pa.Table.from_pylist(ROWS[10:]), mode="append")
    plan = split(store, job(tmp_path), "r")
    assert sorted(texts_by_id(store, plan)) == sorted(r["text"] for r in ROWS)
    assert plan.input.files[0].version == "1"


def test_types_stand_in_the_shard_as_in_the_input(tmp_path: Path, store: Store) -> None:
    table = pa.table(
        {
            "text": pa.array(["a", "b"]).dictionary_encode(),
            "large": pa.array(["x", None], pa.large_string()),
            "money": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "when": pa.array([1, None], pa.timestamp("ns", "Europe/Berlin")),
            "deep": pa.array([{"a": [1], "b": {"c": "d"}}, None]),
        }
    )
    write_input(tmp_path, table)
    template = "{{ text }}{{ large }}{{ money }}{{ when }}{{ deep }}"
    plan = split(store, job(tmp_path, prompt={"template": template}), "r")
    rows = sorted(frozen_rows(store, plan), key=lambda r: r["row_id"])
    assert [r["input"] for r in rows] == table.to_pylist()


def test_nanoseconds_apart_are_no_copies(tmp_path: Path, store: Store) -> None:
    write_input(tmp_path, pa.table({"text": pa.array([1, 2, 1], pa.timestamp("ns"))}))
    plan = split(store, job(tmp_path), "r")
    assert plan.shards[0].sent == 2


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.date32(), pa.decimal128(10, 2), pa.float64(), pa.binary()]
)
def test_an_id_that_is_neither_text_nor_a_whole_number(tmp_path: Path, kind: pa.DataType) -> None:
    write_input(tmp_path, pa.table({"id": pa.nulls(1, kind), "text": ["a"]}))
    given = {"path": str(tmp_path / "in"), "id_column": "id"}
    fails(tmp_path, f"input.id_column: `id` is {kind}", "write it as text", input=given)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.field("element", pa.string())), pa.struct({"a": pa.string()}), pa.binary()]
)
def test_a_true_label_that_no_label_can_equal(tmp_path: Path, store: Store, kind: pa.DataType) -> None:
    write_input(tmp_path, pa.table({"text": ["a"], "label": pa.nulls(1, kind)}))
    given = {"path": str(tmp_path / "in"), "truth": "label"}
    choice = {"type": "choice", "labels": ["a", "b"]}
    fails(tmp_path, f"input.truth: `label` is {kind}", "write it as text", input=given, task=choice)
    plan = split(store, job(tmp_path, input=given, task={"type": "generate"}), "r")
    assert plan.rows == 1, "nothing is compared with it"


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a"]).dictionary_encode(),
        pa.array([1]),
        pa.array([True]),
        pa.array([Decimal("1.5")]),
        pa.nulls(1),
    ],
)
def test_a_true_label_that_reads_like_a_label(tmp_path: Path, store: Store, values: pa.Array) -> None:
    write_input(tmp_path, pa.table({"text": ["a"], "label": values}))
    given = {"path": str(tmp_path / "in"), "truth": "label"}
    labels = [str(values[0].as_py()).lower(), "other"]
    plan = split(store, job(tmp_path, input=given, task={"type": "choice", "labels": labels}), "r")
    commit_run(store, plan, answer=lambda _: labels[0])
    counter = LabelCounter(plan.spec)
    for shard in shards_of(store, plan):
        counter.see(shard)
    scores = counter.scores()
    assert (scores and scores.accuracy) == (1.0 if values[0].is_valid else None)


def test_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    path = write_input(tmp_path, ROWS, "tickets.parquet")
    fails(tmp_path, "does not exist", "did you mean", str(path), input={"path": str(path)[:-1]})


def test_unknown_extension_and_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    fails(tmp_path, "no file with a known extension", ".parquet")
    (tmp_path / "in" / "a.txt").write_text("x")
    fails(tmp_path, "says no format", "input.format", input={"path": str(tmp_path / "in" / "a.txt")})


def test_mixed_formats_and_a_file_named_twice(tmp_path: Path) -> None:
    path = write_input(tmp_path, ROWS)
    fails(tmp_path, "named twice", str(path), input={"path": [str(path), str(tmp_path / "in")]})
    (tmp_path / "in" / "b.csv").write_text("text\nx\n")
    fails(tmp_path, "different formats", "b.csv")


def test_truncated_and_corrupt_parquet(tmp_path: Path) -> None:
    write_input(tmp_path, ROWS)
    other = write_input(tmp_path, ROWS, "b.parquet")
    data = other.read_bytes()
    other.write_bytes(data[: len(data) // 2])
    fails(tmp_path, str(other), "cannot be read as Parquet")
    other.write_bytes(b"PAR1" + b"\xff" * (len(data) - 300) + data[-296:])
    fails(tmp_path, str(other), "write it anew")


def test_files_with_other_columns_or_types(tmp_path: Path) -> None:
    write_input(tmp_path, ROWS)
    other = write_input(tmp_path, [{"id": "1", "body": "x"}], "b.parquet")
    fails(tmp_path, str(other), "no column `text`", "body")
    write_input(tmp_path, [{"id": "1", "text": 5}], "b.parquet")
    fails(tmp_path, str(other), "`text` is int64, but string")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', ["not JSON"]),
        ('{"text": "\\ud800"}', ["surrogate"]),
        ("[1]", ["not a JSON object but list"]),
        ("5", ["not a JSON object but int"]),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n' * 3000 + line + "\n" + '{"text": "b"}\n' * 10)
    fails(tmp_path, f"{path}, line 3001:", "correct or remove the line", *words)


def test_jsonl_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    fails(tmp_path, f"{path}, line 2:", "not UTF-8")


def test_bad_csv_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.csv"
    path.parent.mkdir()
    path.write_text("id,text\n1,a\n2,b\n3,c,d\n")
    fails(tmp_path, str(path), "#4", "Expected 2 columns, got 3")


@pytest.mark.parametrize(
    ("fields", "asked_by"),
    [
        ({"prompt": {"template": "{{ texte }}"}}, "prompt names the column `texte`"),
        ({"input": {"id_column": "ID"}}, "input.id_column names the column `ID`"),
        ({"input": {"carry": ["labl"]}}, "input.carry names the column `labl`"),
        ({"input": {"truth": "lable"}}, "input.truth names the column `lable`"),
    ],
)
def test_missing_column_is_named_with_the_nearest(
    tmp_path: Path, fields: dict[str, Any], asked_by: str
) -> None:
    write_input(tmp_path, ROWS)
    if "input" in fields:
        fields["input"]["path"] = str(tmp_path / "in")
    fails(tmp_path, asked_by, "did you mean", "id, text, label", **fields)


def test_overlong_column_must_be_in_the_prompt(tmp_path: Path) -> None:
    write_input(tmp_path, ROWS)
    fails(tmp_path, "overlong.column", "`label`", overlong={"policy": "truncate", "column": "label"})


def test_null_and_duplicate_ids_with_examples(tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "in"), "id_column": "id"}
    write_input(tmp_path, [*ROWS, {"id": None, "text": "x", "label": ""}])
    fails(tmp_path, "`id` is null in 1 rows", "20", input=given)
    write_input(tmp_path, [*ROWS, *ROWS[3:5]])
    fails(tmp_path, "2 values of `id` stand more than once", "'k3' 2 times (rows 3 and 20)", input=given)


def test_an_id_is_text_or_a_whole_number(tmp_path: Path, store: Store) -> None:
    given = {"path": str(tmp_path / "in"), "id_column": "id"}
    write_input(tmp_path, [{"id": 0.5, "text": "x"}])
    fails(tmp_path, "`id` is double", input=given)
    write_input(tmp_path, [{"id": 2**62 + i, "text": "x"} for i in range(3)])
    plan = split(store, job(tmp_path, input=given), "r")
    ids = {r["custom_id"] for r in frozen_rows(store, plan)}
    assert ids <= {str(2**62 + i) for i in range(3)}


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_empty_datasets(tmp_path: Path, name: str) -> None:
    path = write_input(tmp_path, pa.table({"text": pa.array([], pa.string())}))
    path.unlink()
    path = path.with_name(name)
    if name == "a.parquet":
        write_input(tmp_path, pa.table({"text": pa.array([], pa.string())}))
    else:
        path.write_text("text\n" if name == "a.csv" else "")
    fails(tmp_path, "no rows")


def test_unwritable_store(tmp_path: Path) -> None:
    write_input(tmp_path, ROWS)
    (tmp_path / "store").write_text("a file, no folder")
    spec = job(tmp_path)
    with pytest.raises(StoreError, match="store"):
        split(open_store(spec.store), spec, "r")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_input(tmp_path, ROWS)
    if os.geteuid() == 0:  # root reads everything
        real = open

        def refuse(file: Any, *rest: Any, **options: Any) -> Any:
            if str(file) == str(path):
                raise PermissionError(13, "Permission denied")
            return real(file, *rest, **options)

        monkeypatch.setattr("builtins.open", refuse)
    else:
        path.chmod(0)
    fails(tmp_path, str(path), "cannot be read", "Permission denied")


@pytest.mark.parametrize("rows", [ROWS[:-1], [*ROWS, *ROWS], ROWS[::-1]])
def test_input_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]
) -> None:
    from airflow_batchinfer.pipeline import freeze

    write_input(tmp_path, ROWS)
    real = freeze.place_rows

    def place_and_change(*arguments: Any, **options: Any) -> Any:
        write_input(tmp_path, rows)
        return real(*arguments, **options)

    monkeypatch.setattr(freeze, "place_rows", place_and_change)
    fails(tmp_path, "while it was being split", "run split again")


def test_scratch_is_left_empty(tmp_path: Path, store: Store, scratch: Path) -> None:
    write_input(tmp_path, ROWS)
    split(store, job(tmp_path), "r")
    with pytest.raises(InputError, match="nothing"):
        split(store, job(tmp_path, prompt={"template": "{{ nothing }}"}, name="other"), "r")
    assert not list(scratch.iterdir())


def test_nested_values_in_place(tmp_path: Path, store: Store) -> None:
    table = pa.table({"text": pa.array([["a", "b"], ["a", "b"], None, []], pa.list_(pa.string()))})
    write_input(tmp_path, table)
    plan = split(store, job(tmp_path), "r")
    assert plan.shards[0].sent == 3
    assert sum(r["copies"] for r in frozen_rows(store, plan)) == 1
