from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airflow_batchinfer.errors import GateError
from airflow_batchinfer.pipeline.drift import compare
from airflow_batchinfer.pipeline.histogram import Histogram
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.profile import Profile
from airflow_batchinfer.pipeline.published import last_published, remember_published
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.pipeline.verdict import Check, Verdict
from airflow_batchinfer.run.layout import RunLayout, published_runs
from airflow_batchinfer.spec import DriftSpec
from airflow_batchinfer.store import LocalStore
from tests.releases import rewrite_as_other_release
from tests.unit.pipeline.runs import commit_run, job, write_input
from tests.unit.quality.runs import MadeRun, make_run, make_spec, tickets, truthful

pytestmark = pytest.mark.airflow_env


def published(root: Path, run_id: str, answer: Any = truthful, **spec: Any) -> MadeRun:
    run = make_run(root, tickets(300), answer, spec=make_spec(root, **spec), run_id=run_id)
    run.reconcile()
    validate(run.store, run.folder)
    remember_published(run.store, run.plan)
    return run


def drift(verdict: Verdict) -> dict[str, Check]:
    return {c.name: c for c in verdict.checks if c.origin == "drift"}


def mostly_bugs(row: dict[str, Any]) -> dict[str, Any]:
    return {"output": "bug" if int(row["id"][1:]) % 10 else row["label"]}


def test_a_merge_that_was_killed_at_its_end_is_noted_by_the_next(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_input(tmp_path, [{"text": f"text {i}"} for i in range(9)])
    plan = split(store, job(tmp_path), "monday")
    commit_run(store, plan)
    reconcile(store, plan.folder)
    first = merge(store, plan.folder)
    store.delete(published_runs(plan.job))
    assert merge(store, plan.folder) == first
    later = last_published(store, split(store, job(tmp_path), "tuesday"))
    assert later is not None
    assert later.run_id == "monday"


def test_first_run_has_nothing_to_compare_with(root: Path) -> None:
    run = make_run(root, tickets(30))
    run.reconcile()
    assert drift(validate(run.store, run.folder)) == {}


def test_shifted_labels_warn_in_words(root: Path) -> None:
    published(root, "monday")
    run = make_run(root, tickets(300), mostly_bugs, run_id="tuesday")
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert verdict.success, "a warning does not hold"
    found = drift(verdict)["drift of labels"]
    assert not found.success
    assert found.observed.startswith("`bug` 33.3% before, 93.3% now (PSI ")
    assert found.observed.endswith("against monday")
    assert verdict.message.startswith("Passed with warnings: drift of labels")


def test_drift_holds_if_asked(root: Path) -> None:
    published(root, "monday")
    spec = make_spec(root, drift={"on_drift": "hold"})
    run = make_run(root, tickets(300), mostly_bugs, spec=spec, run_id="tuesday")
    run.reconcile()
    with pytest.raises(GateError, match="drift of labels"):
        validate(run.store, run.folder)


def test_a_run_like_the_last_one_passes(root: Path) -> None:
    published(root, "monday")
    run = make_run(root, tickets(300), run_id="tuesday")
    run.reconcile()
    assert all(c.success for c in drift(validate(run.store, run.folder)).values())


def test_incremental_runs_are_compared_if_they_keep_no_result(root: Path) -> None:
    store = LocalStore(root)

    def night(name: str, answer: str, **fields: Any) -> dict[str, Check]:
        given = {"path": str(root / "in"), "id_column": "id"}
        task = {"type": "choice", "labels": ["billing", "bug"]}
        spec = job(root, store=str(root), input=given, task=task, incremental=True, **fields)
        plan = split(store, spec, name)
        commit_run(store, plan, answer=lambda _: answer)
        reconcile(store, plan.folder)
        checks = drift(validate(store, plan.folder))
        merge(store, plan.folder)
        return checks

    write_input(root, [{"id": f"k{i}", "text": f"text {i}"} for i in range(60)])
    assert night("one", "billing") == {}
    write_input(root, [{"id": f"k{i}", "text": f"text {i // 30 * i}"} for i in range(60)])
    assert night("two", "bug") == {}, "half the input is no sample of it"
    found = night("three", "bug", prompt={"template": "Sort: {{ text }}"})["drift of labels"]
    assert not found.success
    assert found.observed.endswith("against one")
    assert night("four", "bug", prompt={"template": "Sort! {{ text }}"})["drift of labels"].success


def test_a_last_run_that_cannot_be_read_is_a_warning(root: Path) -> None:
    before = published(root, "monday")
    rewrite_as_other_release(before.store, RunLayout(before.folder).validation, speed="fast")
    run = make_run(root, tickets(300), run_id="tuesday")
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert verdict.success
    assert "validation.json is whole, but" in (drift(verdict)["drift"].error or "")
    assert verdict.message.startswith("Passed with warnings: drift: found ")


def test_a_damaged_note_of_published_runs_holds_up_nothing(root: Path) -> None:
    before = published(root, "monday")
    before.store.write_bytes(published_runs(before.plan.job), b"{")
    after = published(root, "tuesday")
    found = last_published(after.store, after.plan.model_copy(update={"folder": "another"}))
    assert found is not None
    assert found.run_id == "tuesday"


def test_validity_and_lengths(root: Path) -> None:
    published(root, "monday")

    def worse(row: dict[str, Any]) -> dict[str, Any]:
        if int(row["id"][1:]) % 7 == 0:
            return {"reason": "empty_output"}
        return {"output": row["label"], "output_tokens": 50}

    run = make_run(root, tickets(300), worse, run_id="tuesday")
    run.reconcile()
    found = drift(validate(run.store, run.folder))
    assert found["drift of rows that succeeded"].observed == "100.0% before, 85.7% now, against monday"
    assert not found["drift of rows that succeeded"].success
    assert not found["drift of output tokens"].success
    assert found["drift of prompt tokens"].success


def test_chance_does_not_warn() -> None:
    draw = np.random.default_rng(0)
    warned = 0
    for _ in range(100):
        one, other = (
            Profile(
                rows=60,
                counts={"succeeded": int(draw.binomial(60, 0.95))},
                labels=dict(zip("abcde", map(int, draw.multinomial(60, [0.2] * 5)), strict=True)),
                output_tokens=Histogram.of(draw.integers(1, 200, 60)),
            )
            for _ in range(2)
        )
        warned += any(not c.success for c in compare(one, other, DriftSpec()))
    assert warned <= 10


def test_the_newest_earlier_run_is_the_baseline(root: Path) -> None:
    first, second = published(root, "one"), published(root, "two")
    third = make_run(root, tickets(9), run_id="three")
    older = first.plan.model_copy(update={"created_at": "2026-01-01T00:00:00+00:00"})
    remember_published(first.store, older)
    found = last_published(third.store, third.plan)
    assert found is not None
    assert found.run_id == "two"
    assert last_published(second.store, older) is None
