"""Spec files that carry code or blow up, and names that would lead out of the store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import SpecError, StoreError
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.spec import InputSpec, JobSpec
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.store import LocalStore, Store, open_store
from airflow_batchinfer.yaml_text import MAX_CHARACTERS, parse_yaml
from tests.unit.contract.test_spec import LEAST

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n"
    for last, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch HERE']",
        "!!python/object/new:os.system ['touch HERE']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/tuple [1]",
        "!!binary aGk=",
        "!!set {a}",
        "!!timestamp 2020-01-01",
        "!env HOME",
        "!!merge x",
    ],
)
def test_no_tag_runs_or_makes_anything(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: {tag.replace('HERE', str(tmp_path / 'made'))}\n")
    with pytest.raises(SpecError, match=r"job\.yaml: .*line 1"):
        load_spec(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "aliases written out"),
        ("a: &a {b: *a}", "contains itself"),
        ("a: &a [*a, *a]", "contains itself"),
        ("[" * 100_000, "nested deeper"),
        ("{a: " * 100_000, "nested deeper"),
        ("- " * 100_000, "nested deeper"),
        ("a: 1\na: 2", "line 2: the field `a` stands twice"),
        ("a: {b: 1, 'b': 2}", "the field `b` stands twice"),
        ("? [a]\n: 1", "a field's name is plain text"),
        ("a: 1\n---\na: 2", "single document"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
        ("x" * (MAX_CHARACTERS + 1), "longer than"),
        ('"\\ud800"', "surrogate"),
    ],
)
def test_what_blows_up_or_hides_something_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text)
    assert words in str(caught.value)


def test_anchors_and_merges_are_for_use() -> None:
    text = (
        'base: &b {max_tokens: 5}\nsampling: {<<: *b, top_p: 1.0}\nday: 2020-01-01\nemoji: "\\ud83d\\ude00"'
    )
    assert parse_yaml(text) == {
        "base": {"max_tokens": 5},
        "sampling": {"max_tokens": 5, "top_p": 1.0},
        "day": "2020-01-01",
        "emoji": "😀",
    }


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "/etc", ".hidden", "a\n", "a\0", "-rf", "~", "dead_letters", ""]
)
def test_a_jobs_name_is_one_folder_of_its_own(name: str) -> None:
    with pytest.raises(SpecError):
        JobSpec.parse(LEAST | {"name": name})


@pytest.mark.parametrize(
    "run_id", ["..", ".", "...", "../../../etc/passwd", "a/../../b", "/etc", "~", "\0", "-", " "]
)
def test_a_runs_folder_stands_in_its_jobs(tmp_path: Path, run_id: str) -> None:
    root = tmp_path / "store"
    folder = Path(root, RunLayout(run_dir("job", run_id)).plan).resolve()
    assert folder.parent.parent == root / "job" / "runs"


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    return open_store("s3://bucket/prefix", {"endpoint_url": "http://127.0.0.1:9", "region": "us-east-1"})


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a/../../../x"])
def test_no_key_leaves_the_store(store: Store, key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    calls: list[Any] = [
        lambda: store.read_bytes(key),
        lambda: store.write_bytes(key, b"x"),
        lambda: store.put_file(source, key),
        lambda: store.delete(key),
        lambda: store.exists(key),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="leaves the store"):
            call()
    assert source.exists()


def test_a_link_in_the_store_is_replaced_or_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """Whoever may write into the store can put a link there; our own rights must not carry through it."""
    outside, store = tmp_path / "outside", LocalStore(tmp_path / "store")
    outside.write_bytes(b"theirs")
    source = tmp_path / "source"
    source.write_bytes(b"ours")
    calls: list[Any] = [
        lambda key: store.write_bytes(key, b"ours"),
        lambda key: store.put_file(source, key),
        lambda key: store.delete(key),
    ]
    for number, call in enumerate(calls):
        link = tmp_path / "store" / "job" / f"{number}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        call(f"job/{number}")
        assert not link.is_symlink()
    assert outside.read_bytes() == b"theirs"
    assert [info.key for info in store.list("job")] == ["job/0", "job/1"]
    assert store.read_bytes("job/0") == store.read_bytes("job/1") == b"ours"


def test_nothing_behind_a_linked_folder_is_listed_or_removed(tmp_path: Path) -> None:
    """What removes a run removes what the store lists."""
    outside, store = tmp_path / "outside", LocalStore(tmp_path / "store")
    store.write_bytes("job/runs/run/plan.json", b"x")
    outside.mkdir()
    (outside / "theirs").write_bytes(b"theirs")
    (outside / ".tmp-theirs").write_bytes(b"theirs")
    (tmp_path / "store" / "job" / "runs" / "run" / "shards").symlink_to(outside)
    assert [info.key for info in store.list("job")] == ["job/runs/run/plan.json"]
    assert store.remove_unfinished("job", timedelta(0)) == 0
    assert sorted(path.name for path in outside.iterdir()) == [".tmp-theirs", "theirs"]


def test_an_input_folder_is_read_through_links_to_files_as_any_tool_reads_it(tmp_path: Path) -> None:
    """The input is what the job's author names; a linked file is part of it, under the link's name."""
    pytest.importorskip("deltalake")
    from airflow_batchinfer.pipeline.inputs import FoundTable, find_input

    (tmp_path / "in").mkdir()
    for name in ("outside.jsonl", "passwd"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "in" / "a.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "in" / "passwd").symlink_to(tmp_path / "passwd")  # no known extension: not data
    (tmp_path / "in" / "gone.jsonl").symlink_to(tmp_path / "gone")
    found = find_input(InputSpec(path=str(tmp_path / "in")))
    assert not isinstance(found, FoundTable)
    assert [file.identity.uri for file in found] == [str(tmp_path / "in" / "a.jsonl")]


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "/etc", "x\ny", "user.name", "[0]", "output';drop table x;--"]
)
def test_columns_are_names_and_never_paths_or_code(tmp_path: Path, name: str) -> None:
    """Carried and output columns with names from outside, all the way into table and export."""
    pytest.importorskip("deltalake")
    from airflow_batchinfer.pipeline.split import split
    from tests.unit.pipeline.runs import job, publish_run, table_rows, write_input

    write_input(tmp_path, pa.table({"text": ["a", "b"], name: ["1", "2"]}))
    given = {"path": str(tmp_path / "in"), "carry": [name]}
    export = [{"format": kind, "path": str(tmp_path / f"out.{kind}")} for kind in ("csv", "jsonl", "parquet")]
    spec = job(tmp_path, input=given, output={"column": f"o{name}"}, export=export)
    store = open_store(spec.store)
    publish_run(store, split(store, spec, "../../run"))
    rows = table_rows(store, "job/results")
    assert [row[name] for row in rows] == ["1", "2"]
    assert rows[0][f"o{name}"] == "answer to {'text': 'a'}"
    assert pq.read_table(tmp_path / "out.parquet")[name].to_pylist() == ["1", "2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "in",
        "out.csv",
        "out.jsonl",
        "out.parquet",
        "store",
    ]
    assert not list(tmp_path.parent.glob("x*"))
