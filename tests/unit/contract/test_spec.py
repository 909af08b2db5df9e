"""The user's contract: what a spec takes, and what it says when it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.run.layout import DEAD_LETTERS
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.yaml_text import read_fields

LEAST: dict[str, Any] = {
    "name": "job",
    "input": {"path": "in.parquet"},
    "prompt": {"template": "{{ text }}"},
    "model": {"name": "m"},
    "store": "store",
}


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = {k: dict(v) if isinstance(v, dict) else v for k, v in LEAST.items()}
    *parents, last = path.split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("inpt", {}, "inpt: unknown field; did you mean `input`?"),
        ("input.pth", "x", "input.pth: unknown field; did you mean `path`? (allowed: "),
        ("input.path", [], "input.path: name at least one file"),
        (
            "input.path",
            ["a.csv", "gs://b/a.csv"],
            "input.path: `gs://` is no store: give a local path or `s3://",
        ),
        ("store", "gs://bucket", "store: `gs://` is no store"),
        ("export", [{"format": "csv", "path": "S3://b/x.csv"}], "export.0.path: `S3://` is no store"),
        ("input.format", "xml", "input.format: Input should be 'auto', 'parquet', 'jsonl', 'csv' or 'delta'"),
        ("name", "a b", "name: use letters, digits"),
        ("name", "job\n", "name: use letters, digits"),
        ("name", DEAD_LETTERS, "is the name of a table's folder in the store"),
        ("input.path", "a\0b", "`input.path` holds the character NUL"),
        ("checkpoint.seconds", float("inf"), "checkpoint.seconds: Input should be a finite number"),
        ("model.engine", {"x": float("nan")}, "model.engine: is no JSON"),
        ("prompt.template", "{{ text", "prompt: template: line 1:"),
        ("prompt.messages", [{"role": "user", "content": "x"}], "give exactly one of"),
        ("sampling.max_tokens", 0, "sampling.max_tokens: Input should be greater than or equal to 1 (got 0)"),
        ("task", {"type": "pick"}, "'generate', 'choice', 'json', 'regex', 'embed'"),
        ("task", {"type": "choice", "labels": ["a", "a"]}, "labels must be distinct"),
        ("task", {"type": "choice", "label": ["a"]}, "task.label: unknown field; did you mean `labels`?"),
        ("task", {"type": "regex", "pattern": "("}, "not a regular expression"),
        ("task", {"type": "regex", "pattern": "a{e"}, "not a regular expression: expected }"),
        ("task", {"type": "regex", "pattern": "(?a)(?u)"}, "not a regular expression: ASCII"),
        ("model.backend", "vlm", "`backend` must be `vllm`, `openai` or `package.module:Class`"),
        ("model.base_url", "http://x", "belong to `backend: openai`"),
        ("model.engine", {"trust_remote_code": True}, "set `model.trust_remote_code`"),
        ("model.engine", {"data_parallel_size": 2}, "workers at once are `sharding.max_parallel_shards`"),
        ("overlong", {"policy": "truncate"}, "needs `column`"),
        ("output.column", "row_id", "is taken by the results table"),
        ("input.carry", ["finish_reason"], "collides with a column of the results table"),
        ("storage_options", {"aws_secret_access_key": "x"}, "credentials"),
        (
            "failure",
            {"max_dead_by_reason": {"overlong": 0.1}},
            "by_reason.overlong: unknown reason (allowed: empty_input, ",
        ),
        (
            "failure",
            {"max_dead_by_reason": {"over_long": 5}},
            "by_reason.over_long: Input should be",
        ),
        ("gate", {"max_tokens": 5}, "`gate.max_tokens` needs `pilot`"),
        ("gate", {"approval": "required"}, "`gate.approval` needs `pilot`"),
        ("line", {"window": 50, "min_rows": 60}, "`min_rows` (60) is more than `window` (50)"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path_and_what_is_allowed(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(_changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": {"max_cost": 5}}, "`gate.max_cost` needs `cost`"),
        ({"gate": {"max_cost": 5}, "cost": {"currency": "EUR"}}, "`gate.max_cost` needs `cost`"),
        (
            {"gate": {"max_refusal_fraction": 0.1}, "task": {"type": "regex", "pattern": "a"}},
            "`gate.max_refusal_fraction` is for `task.type: generate`",
        ),
        (
            {"gate": {"max_identical_fraction": 0.9}, "task": {"type": "embed"}},
            "is not for `task.type: embed`",
        ),
        ({"line": {"max_empty": 0.9}, "task": {"type": "embed"}}, "`line.max_empty` is not for"),
    ],
)
def test_a_limit_that_nothing_could_break_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(LEAST | {"pilot": {}} | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("task", "combine", "message"),
    [
        ({"type": "generate"}, "concat", None),
        ({"type": "generate"}, "list", None),
        ({"type": "generate"}, "majority", "needs `overlong.combine: concat` or `list` (got `majority`)"),
        ({"type": "choice", "labels": ["a", "b"]}, "majority", None),
        (
            {"type": "choice", "labels": ["a", "b"]},
            "concat",
            "needs `overlong.combine: majority` (got `concat`)",
        ),
        ({"type": "choice", "labels": ["a", "b"]}, "list", "needs `overlong.combine: majority` (got `list`)"),
        ({"type": "json", "schema": {}}, "list", "is not for `task.type: json`"),
        ({"type": "regex", "pattern": "a"}, "concat", "is not for `task.type: regex`"),
        ({"type": "embed"}, "concat", "is not for `task.type: embed`"),
    ],
)
def test_answers_to_windows_must_make_an_answer_of_the_task(
    task: dict[str, Any], combine: str, message: str | None
) -> None:
    overlong = {"policy": "split", "column": "text", "combine": combine}
    if message is None:
        assert JobSpec.parse(LEAST | {"task": task, "overlong": overlong}).overlong.combine == combine
        return
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(LEAST | {"task": task, "overlong": overlong})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": {"max_tokens": 5}},
        {"gate": {"min_judge_pass": 0.5}},
        {"line": {"window": 50, "min_rows": 60}},
        {"export": [{"format": "csv", "path": "gs://b/x.csv"}]},
        {"failure": {"max_dead_by_reason": {"overlong": 0.1}}},
        {"model": {"name": "m", "engine": {"data_parallel_size": 2}}},
        {"overlong": {"policy": "split", "column": "text"}, "task": {"type": "json", "schema": {}}},
    ],
)
def test_a_spec_that_a_plan_has_is_read_whatever_new_ones_are_refused_for(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        JobSpec.parse(LEAST | fields)
    stored = JobSpec.parse(LEAST | fields, stored=True)
    assert JobSpec.parse(stored.dump(), stored=True) == stored
    with pytest.raises(SpecError, match=r"gate\.max_token: unknown field"):
        JobSpec.parse(LEAST | fields | {"gate": {"max_token": 5}}, stored=True)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"name": "a b", "sampling": {"top_p": 2}})
    assert len(str(caught.value).splitlines()) == 6  # four missing fields and two wrong ones


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    template=st.text(st.characters(exclude_characters="{}\0", exclude_categories=["Cs"])),
    labels=st.lists(st.text("abc ", min_size=1).filter(str.strip), min_size=2, unique=True),
    carry=st.lists(st.sampled_from(["a", "b", "ünïcode", "with space"]), unique=True),
)
def test_a_spec_survives_json_and_yaml(
    name: str, template: str, labels: list[str], carry: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = JobSpec.parse(
        LEAST
        | {
            "name": name,
            "prompt": {"template": template + "{{ text }}"},
            "task": {"type": "choice", "labels": labels},
            "input": {"path": "x.csv", "carry": carry},
        }
    )
    assert JobSpec.parse(spec.dump()) == spec
    path = tmp_path_factory.mktemp("spec") / "job.yaml"
    path.write_text(spec.to_yaml(), encoding="utf-8")
    assert JobSpec.parse(read_fields(path)) == spec


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "is a mapping of fields, not list"),
        ("a: [", "cannot be read as YAML"),
        ("name: !!python/object/apply:os.system ['true']", "line 1: the tag"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_the_truth_column_is_carried_once() -> None:
    spec = JobSpec.parse(LEAST | {"input": {"path": "x.csv", "carry": ["a", "t"], "truth": "t"}})
    assert spec.carried == ["a", "t"]


@pytest.mark.parametrize("line_break", ["\x85", "\u2028", "\u2029", "\r", "\n"])
def test_line_breaks_survive_yaml(tmp_path: Path, line_break: str) -> None:
    spec = JobSpec.parse(LEAST | {"prompt": {"template": f"a{line_break} b {{{{ text }}}}"}})
    path = tmp_path / "job.yaml"
    path.write_text(spec.to_yaml(), encoding="utf-8")
    assert JobSpec.parse(read_fields(path)) == spec
