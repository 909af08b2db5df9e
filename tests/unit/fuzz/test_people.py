"""What people write: spec files, forms, overrides, review sheets. Read right, or refused with words."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import InputError, SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.yaml_text import parse_yaml
from tests.plans import job
from tests.unit.fuzz.damage import NASTY, damaged, fuzzed

pytestmark = pytest.mark.airflow_env

SPEC = job(
    Path("/store"),
    input={"path": ["a.csv", "b.csv"], "carry": ["n"]},
    prompt={"messages": [{"role": "user", "content": "Wie? {{ text }}"}], "examples": []},
    model={"name": "m", "engine": {"max_model_len": 4096, "rope": {"a": [1.5, None, True]}}},
    task={"type": "json", "schema": {"type": "object", "properties": {"é": {"type": "string"}}}},
    pilot={"rows": 5},
)
YAML = SPEC.to_yaml().encode()
SHEET = (
    "\ufeffrun,row_id,custom_id,prompt,output,correct,comment\r\n"
    'job/runs/r,3,k3,"[user] a ""b""\nc",x,yes,\r\njob/runs/r,5,k5,p,y,No,"because, no"\r\n'
    "job/runs/r,9,k9,p,z,,\r\n"
).encode()
NAME = st.text(max_size=60)
"""YAML takes field names of up to 1,024 characters, escapes written out."""
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAME, inner, max_size=4)),
    max_leaves=12,
)
ODD = st.one_of(
    JSON,
    st.floats(),
    st.sampled_from(
        [10**5000, "\ud800", "\0", {1: 2}, {"a": float("nan")}, {"type": []}, b"bytes", object()]
    ),
)


def _paths(fields: Any) -> list[list[str | int]]:
    """Where each value of nested fields stands."""
    if not isinstance(fields, (dict, list)):
        return [[]]
    items = fields.items() if isinstance(fields, dict) else enumerate(fields)
    return [[], *([name, *rest] for name, value in items for rest in _paths(value))]


@fuzzed(60)
@given(JSON)
def test_yaml_is_read_as_it_was_written(value: Any) -> None:
    assert parse_yaml(yaml.safe_dump(value)) == value
    text = json.dumps(value)
    # To YAML 1.1, a number with an exponent and no dot is a text.
    assert parse_yaml(text) == value or re.search(r"\de[-+]?\d", text)


@fuzzed(150)
@given(damaged(YAML))
def test_a_damaged_spec_file_is_a_spec_or_refused_by_name(injured: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_bytes(injured)
        try:
            spec = load_spec(path)
        except SpecError as error:
            message = str(error)
        else:
            assert JobSpec.parse(spec.dump()) == spec
            return
    assert message.startswith(f"{path}: ")


@pytest.mark.parametrize("piece", NASTY, ids=lambda piece: repr(piece[:12]))
def test_no_piece_upsets_a_spec_file(tmp_path: Path, piece: bytes) -> None:
    path = tmp_path / "job.yaml"
    for data in (
        piece,
        b"name: " + piece,
        b"model:\n  engine: {a: " + piece + b"}\n",
        YAML + piece,
        piece + YAML,
    ):
        path.write_bytes(data)
        try:
            assert load_spec(path).name
        except SpecError as error:
            message = str(error)
        else:
            continue
        assert str(path) in message


@fuzzed(150)
@given(path=st.sampled_from(_paths(SPEC.dump())[1:]), value=ODD)
def test_a_field_of_any_type_is_taken_or_named(path: list[str | int], value: Any) -> None:
    fields = SPEC.dump()
    inner: Any = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    try:
        spec = JobSpec.parse(fields)
    except SpecError as error:
        message = str(error)
    else:
        assert JobSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
        return
    assert message.strip()


def test_a_number_too_long_to_print_is_refused_in_few_words() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(SPEC.dump() | {"sampling": {"max_tokens": -(10**5000), "top_p": "x" * 10_000}})
    assert len(str(caught.value)) < 1000


@fuzzed(60)
@given(
    overrides=damaged(b"prompt: {template: 'Kurz: {{ text }}'}\nsampling:\n  max_tokens: 9\n"),
    form=damaged(YAML),
)
def test_overrides_and_forms_are_taken_or_refused(overrides: bytes, form: bytes) -> None:
    from airflow_batchinfer.form import ADVANCED, job_of_form
    from airflow_batchinfer.operators.replay import overrides_of

    box, fields = overrides.decode("utf-8", "replace"), form.decode("utf-8", "replace")
    for read in (lambda: overrides_of({"overrides": box}), lambda: job_of_form("/")({ADVANCED: fields})):
        with suppress(SpecError):
            assert read() is not None


def _store_with_run(folder: str | Path) -> LocalStore:
    store = LocalStore(folder)
    store.write_bytes("job/runs/r/plan.json", b"")
    return store


@fuzzed(150)
@given(damaged(SHEET))
def test_a_damaged_review_sheet_is_counted_right_or_refused(injured: bytes) -> None:
    from airflow_batchinfer.pipeline.eyes import read_sheet

    with tempfile.TemporaryDirectory() as folder:
        try:
            review = read_sheet(_store_with_run(folder), "job/runs/r", injured)
        except InputError as error:
            message = str(error)
        else:
            assert review.correct + len(review.wrong) == review.judged <= review.sampled
            assert len(set(review.wrong)) == len(review.wrong)
            return
    assert "review sheet" in message


def test_a_review_sheet_as_it_was_filled_in(tmp_path: Path) -> None:
    from airflow_batchinfer.pipeline.eyes import read_sheet

    review = read_sheet(_store_with_run(tmp_path), "job/runs/r", SHEET)
    assert (review.sampled, review.judged, review.correct, review.wrong) == (3, 2, 1, [5])
    twice = SHEET + b"job/runs/r,5,k5,p,y,yes,\r\n"
    with pytest.raises(InputError, match="record 5: row_id 5 stands twice"):
        read_sheet(LocalStore(tmp_path), "job/runs/r", twice)
