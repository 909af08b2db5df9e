"""The run's data model: fingerprints, epochs, the rule by which readers choose a commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.outcome import Outcome, Reason, outcome_of
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens, chosen_commit, commits_of
from airflow_batchinfer.run.epoch import EPOCH_PATTERN, new_epoch
from airflow_batchinfer.run.fingerprint import (
    DECIDING_SECTIONS,
    DEFAULTS,
    changed_fields,
    fingerprint,
    fingerprint_fields,
)
from airflow_batchinfer.run.layout import RunLayout, run_dir, safe_run_id
from airflow_batchinfer.spec import (
    ChoiceTask,
    EmbedTask,
    GenerateTask,
    JobSpec,
    JsonTask,
    ModelSpec,
    OverLongSpec,
    PromptSpec,
    RegexTask,
    SamplingSpec,
)
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.store.base import ObjectInfo
from tests.unit.contract.test_spec import LEAST

BASE = JobSpec.parse(LEAST)

DECIDING: dict[str, dict[str, Any]] = {
    "prompt.template": {"prompt": {"template": "other {{ text }}"}},
    "prompt.system": {"prompt": {"template": "{{ text }}", "system": "s"}},
    "prompt.examples": {"prompt": {"template": "{{ text }}", "examples": [{"user": "u", "assistant": "a"}]}},
    "prompt.chat_template": {"prompt": {"template": "{{ text }}", "chat_template": "x"}},
    "task.type": {"task": {"type": "regex", "pattern": "a"}},
    "task.compact": {"task": {"type": "json", "schema": {}, "compact": False}},
    "model.name": {"model": {"name": "n"}},
    "model.revision": {"model": {"name": "m", "revision": "r"}},
    "model.adapter": {"model": {"name": "m", "adapter": "a"}},
    "model.engine.quantization": {"model": {"name": "m", "engine": {"quantization": "fp8"}}},
    "model.engine.dtype": {"model": {"name": "m", "engine": {"dtype": "float16"}}},
    "model.engine.load_format": {"model": {"name": "m", "engine": {"load_format": "dummy"}}},
    "sampling.temperature": {"sampling": {"temperature": 0.5}},
    "sampling.max_tokens": {"sampling": {"max_tokens": 9}},
    "overlong.policy": {"overlong": {"policy": "truncate", "column": "text"}},
}

NEUTRAL: list[dict[str, Any]] = [
    {"model": {"name": "m", "engine": {"max_num_seqs": 7, "gpu_memory_utilization": 0.5}}},
    {"checkpoint": {"rows": 1}},
    {"retry": {"reclaims": 1}},
    {"failure": {"max_dead_fraction": 1.0}},
    {"sharding": {"max_rows": 3}},
    {"report": {"samples": 1}},
]


@pytest.mark.parametrize("field", sorted(DECIDING))
def test_a_field_that_decides_an_output_changes_the_fingerprint_and_is_named(field: str) -> None:
    other = JobSpec.parse(LEAST | DECIDING[field])
    assert fingerprint(other) != fingerprint(BASE)
    assert field in changed_fields(fingerprint_fields(BASE), fingerprint_fields(other))


@pytest.mark.parametrize("change", NEUTRAL)
def test_a_field_that_decides_nothing_does_not(change: dict[str, Any]) -> None:
    assert fingerprint(JobSpec.parse(LEAST | change)) == fingerprint(BASE)


def test_a_field_that_a_release_adds_changes_no_fingerprint_until_it_is_set() -> None:
    class LaterSampling(SamplingSpec):
        speed: float = 1.0

    class LaterSpec(JobSpec):
        sampling: LaterSampling = Field(default_factory=LaterSampling)

    for change in ({}, *DECIDING.values()):
        assert fingerprint(LaterSpec.parse(LEAST | change)) == fingerprint(JobSpec.parse(LEAST | change))
    assert fingerprint(LaterSpec.parse(LEAST | {"sampling": {"speed": 2.0}})) != fingerprint(BASE)


def test_a_default_that_is_written_out_is_the_default() -> None:
    assert fingerprint(JobSpec.parse(BASE.dump())) == fingerprint(BASE)
    least = {"task": {"type": "json", "schema": {}}}
    written_out = {"task": {"type": "json", "schema": {}, "compact": True}}
    assert fingerprint(JobSpec.parse(LEAST | written_out)) == fingerprint(JobSpec.parse(LEAST | least))


DEFAULTS_BY_NUMBER: dict[int, dict[str, Any]] = {
    1: {
        "PromptSpec.template": None,
        "PromptSpec.system": None,
        "PromptSpec.messages": None,
        "PromptSpec.examples": [],
        "PromptSpec.chat": True,
        "PromptSpec.chat_template": None,
        "GenerateTask.type": "generate",
        "JsonTask.compact": True,
        "EmbedTask.normalize": True,
        "SamplingSpec.max_tokens": 256,
        "SamplingSpec.temperature": 0.0,
        "SamplingSpec.top_p": 1.0,
        "SamplingSpec.top_k": 0,
        "SamplingSpec.min_p": 0.0,
        "SamplingSpec.presence_penalty": 0.0,
        "SamplingSpec.frequency_penalty": 0.0,
        "SamplingSpec.repetition_penalty": 1.0,
        "SamplingSpec.stop": [],
        "SamplingSpec.seed": 0,
        "OverLongSpec.policy": "reject",
        "OverLongSpec.column": None,
        "OverLongSpec.keep": "start",
        "OverLongSpec.overlap_tokens": 64,
        "OverLongSpec.combine": "concat",
        "OverLongSpec.separator": "\n",
        "ModelSpec.revision": None,
        "ModelSpec.tokenizer": None,
        "ModelSpec.backend": "vllm",
        "ModelSpec.engine": {},
        "ModelSpec.adapter": None,
        "ModelSpec.trust_remote_code": False,
        "ModelSpec.base_url": None,
    }
}


def test_a_default_that_changes_changes_all_fingerprints() -> None:
    """They leave it out: with the old answers under the new default's fingerprint, the two would mix."""
    sections = (PromptSpec, GenerateTask, ChoiceTask, JsonTask, RegexTask, EmbedTask)
    defaults = {
        f"{section.__name__}.{name}": field.get_default(call_default_factory=True)
        for section in (*sections, SamplingSpec, OverLongSpec, ModelSpec)
        for name, field in section.model_fields.items()
        if not field.is_required()
    }
    neutral = {f"ModelSpec.{name}" for name in ("api_key_env", "compile_cache", "max_concurrency")}
    assert {k: v for k, v in defaults.items() if k not in neutral} == DEFAULTS_BY_NUMBER[DEFAULTS], (
        "a new field: add it here. A new default: count up DEFAULTS in run/fingerprint.py, and list them anew"
    )


def test_every_section_of_a_spec_either_decides_outputs_or_is_known_not_to() -> None:
    """A new section is in the fingerprint, or someone has thought about why not and says so here."""
    neutral = {
        *(
            "name",
            "input",
            "store",
            "storage_options",
            "output",
            "sharding",
            "checkpoint",
            "retry",
            "failure",
        ),
        *("validation", "line", "pilot", "gate", "judge", "cost", "drift", "report", "export", "incremental"),
        *("removed_rows", "on_changed_spec"),
    }
    assert set(JobSpec.model_fields) == neutral | set(DECIDING_SECTIONS)


def test_a_new_field_of_the_model_decides_until_it_is_said_not_to() -> None:
    fields = {f"model.{name}" for name in type(BASE.model).model_fields}
    neutral = {f"model.{name}" for name in ("api_key_env", "compile_cache", "engine", "max_concurrency")}
    assert fields - set(fingerprint_fields(BASE)) == neutral


def test_every_reason_has_its_outcome() -> None:
    assert {outcome_of(reason) for reason in Reason} == set(Outcome) - {
        Outcome.SUCCEEDED,
        Outcome.UNPROCESSED,
    }
    assert outcome_of(None) is Outcome.SUCCEEDED


def test_epochs_are_unique_and_sort_by_time() -> None:
    epochs = [new_epoch() for _ in range(500)]
    assert len(set(epochs)) == 500
    assert all(EPOCH_PATTERN.fullmatch(e) for e in epochs)
    stamps = [e.split("-")[0] for e in epochs]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize(
    "run_id", ["manual__2026-11-29T17:00:00+00:00", "../../etc", "a/b", "", "..", ".", "名前", "x" * 300]
)
def test_a_run_id_of_any_kind_is_one_folder_name(run_id: str) -> None:
    safe = safe_run_id(run_id)
    assert safe
    assert "/" not in safe
    assert len(safe) <= 250
    assert run_dir("job", run_id).startswith("job/runs/")
    assert ".." not in Path(run_dir("job", run_id)).parts


def _commit(store: LocalStore, epoch: str, fingerprint: str = "f", rows: int = 2) -> None:
    part = CommittedPart(key="p", rows=rows, bytes=1, sha256="0")
    Commit(
        shard=0,
        epoch=epoch,
        fingerprint=fingerprint,
        created_at="2026-01-01T00:00:00+00:00",
        rows_sha256="0",
        rows=2,
        sent=2,
        counts={"succeeded": 2},
        reasons={},
        tokens=Tokens(),
        parts=[part],
    ).write(store, RunLayout("job/runs/r").commit(0, epoch))


def test_readers_choose_the_lowest_epoch_with_the_plans_fingerprint(tmp_path: Path) -> None:
    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    assert chosen_commit(store, layout, 0, "f") is None
    _commit(store, "20260101T000000003Z-00000000")
    _commit(store, "20260101T000000001Z-00000000", fingerprint="old")
    _commit(store, "20260101T000000002Z-00000000")
    chosen = chosen_commit(store, layout, 0, "f")
    assert chosen is not None
    assert chosen.epoch == "20260101T000000002Z-00000000"


class WithGhost(LocalStore):
    """It lists an object that is deleted before it can be read."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield ObjectInfo(f"{prefix}/20260101T000000001Z-00000000/commit.json", 1, 0.0)
        yield from super().list(prefix)


def test_a_commit_that_is_withdrawn_while_it_is_looked_for_does_not_end_its_reader(tmp_path: Path) -> None:
    store, layout = WithGhost(tmp_path), RunLayout("job/runs/r")
    _commit(store, "20260101T000000002Z-00000000")
    commits, damaged = commits_of(store, layout, 0)
    assert [commit.epoch for commit in commits] == ["20260101T000000002Z-00000000"]
    assert damaged == []


def test_a_commit_whose_sums_differ_cannot_be_written_and_is_no_commit_when_read(tmp_path: Path) -> None:
    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    with pytest.raises(ValueError, match="its parts hold 1 rows, the shard sends 2"):
        _commit(store, "20260101T000000001Z-00000000", rows=1)
    _commit(store, "20260101T000000002Z-00000000")
    key = layout.commit(0, "20260101T000000002Z-00000000")
    store.write_bytes(key, store.read_bytes(key).replace(b'"sent": 2', b'"sent": 3'))
    commits, damaged = commits_of(store, layout, 0)
    assert commits == []
    assert "its parts hold 2 rows" in damaged[0]
    with pytest.raises(CorruptError, match=r"commit\.json is damaged"):
        Commit.read(store, key)
