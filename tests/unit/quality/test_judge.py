"""A model judges a sample of the answers; its scores are a limit."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airflow_batchinfer.errors import GateError, IncompleteRunError, SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.gate import check_run
from airflow_batchinfer.pipeline.housekeeping import delete_orphans
from airflow_batchinfer.pipeline.judge import prepare_judge
from airflow_batchinfer.pipeline.judge_cost import JudgeCost
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.pipeline.sampling import StratifiedSample
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.statistics import mean_interval
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.status import plan_objects
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore, Store
from tests.unit.pipeline.runs import commit_run, commit_shard, frozen_rows, job, publish_run, write_input

pytestmark = pytest.mark.airflow_env

LABELS = ["billing", "bug"]
VERDICT = {
    "rows": 20,
    "prompt": {"template": "{{ channel }}: {{ text }} was sorted as {{ output }}. Right?"},
    "task": {"type": "choice", "labels": ["right", "wrong"]},
    "passing": ["right"],
}
SCORE = {
    **VERDICT,
    "task": {"type": "json", "schema": {"type": "object", "properties": {"score": {"type": "number"}}}},
    "min_score": 4,
}
del SCORE["passing"]


@pytest.fixture
def store(root: Path) -> Store:
    return LocalStore(root)


def judged_job(root: Path, judge: dict[str, Any], **fields: Any) -> JobSpec:
    sections: dict[str, Any] = {
        "store": str(root),
        "input": {"path": str(root / "in"), "carry": ["channel"]},
        "task": {"type": "choice", "labels": LABELS},
        "sharding": {"max_rows": 40},
        "judge": judge,
    }
    return job(root, **sections | fields)


def answered(root: Path, store: Store, judge: dict[str, Any] = VERDICT, **fields: Any) -> Plan:
    """A reconciled run of 100 rows; one in five is `bug`, and row 1 is dead."""
    write_input(root, [{"text": f"t{i}", "channel": "mail"} for i in range(100)])
    plan = split(store, judged_job(root, judge, **fields), "run")
    commit_run(
        store,
        plan,
        answer=lambda r: LABELS[r["row_id"] % 5 == 0],
        dead=lambda i: Reason.TIMED_OUT if i == 1 else None,
    )
    reconcile(store, plan.folder)
    return plan


def test_the_sample_is_of_good_answers_and_each_label_has_its_share(root: Path, store: Store) -> None:
    plan = answered(root, store)
    asked = prepare_judge(store, plan.folder)
    rows = frozen_rows(store, asked)
    assert Counter(row["input"]["output"] for row in rows) == {"billing": 16, "bug": 4}
    assert 1 not in {row["row_id"] for row in rows}
    for row in rows:
        i = row["row_id"]
        assert row["input"] == {"channel": "mail", "text": f"t{i}", "output": LABELS[i % 5 == 0]}
    assert asked.folder.startswith(f"{plan.folder}/judge/")
    assert prepare_judge(store, plan.folder) == asked, "a second call finds what was paid for"
    keys = [info.key for info in plan_objects(store, "job")]
    assert keys == [RunLayout(plan.folder).plan], "it is no run of the job's own"


def test_input_columns_named_as_ours_are_not_taken_for_them(root: Path, store: Store) -> None:
    write_input(root, [{"text": f"t{i}", "row_id": 1000 + i, "output": "gold"} for i in range(40)])
    prompt = {"template": "{{ row_id }} {{ text }}: {{ label }}, not {{ output }}?"}
    spec = judged_job(
        root,
        {**VERDICT, "prompt": prompt},
        input={"path": str(root / "in"), "carry": ["output"]},
        output={"column": "label"},
        prompt={"template": "{{ row_id }} {{ text }}"},
    )
    plan = split(store, spec, "run")
    commit_run(store, plan, answer=lambda r: LABELS[r["row_id"] % 2])
    reconcile(store, plan.folder)
    rows = frozen_rows(store, prepare_judge(store, plan.folder))
    assert len(rows) == 20
    for row in rows:
        i = row["row_id"]
        assert row["input"] == {"row_id": 1000 + i, "text": f"t{i}", "label": LABELS[i % 2], "output": "gold"}


def test_strata_have_their_shares() -> None:
    ids = np.arange(1000)
    strata = np.where(ids < 100, "rare", "common").astype(np.str_)
    drawn, in_pieces = StratifiedSample(50, 7), StratifiedSample(50, 7)
    drawn.add(ids, strata, 0)
    for start in range(0, 1000, 130):
        in_pieces.add(ids[start : start + 130], strata[start : start + 130], start)
    chosen = drawn.by_tag()[0]
    assert (len(chosen), int((chosen < 100).sum())) == (50, 5)
    assert sorted(np.concatenate(list(in_pieces.by_tag().values()))) == chosen.tolist()
    other = StratifiedSample(50, 8)
    other.add(ids, strata, 0)
    assert other.by_tag()[0].tolist() != chosen.tolist()
    few = StratifiedSample(5000, 7)
    few.add(ids, strata, 0)
    assert few.by_tag()[0].tolist() == ids.tolist()


def test_the_share_that_passes_is_told_with_its_interval(root: Path, store: Store) -> None:
    plan = answered(root, store, gate={"min_judge_pass": 0.7})
    asked = prepare_judge(store, plan.folder)
    ids = sorted(row["row_id"] for row in frozen_rows(store, asked))
    commit_run(
        store,
        asked,
        answer=lambda r: "wrong" if r["row_id"] in ids[:4] else "right",
        dead=lambda i: Reason.INVALID_OUTPUT if i in ids[4:6] else None,
    )
    verdict = validate(store, plan.folder)
    scores = verdict.judge
    assert scores is not None
    assert (scores.sampled, scores.judged, scores.passed) == (20, 18, 14)
    assert scores.not_judged == {"invalid_output": 2}
    assert scores.tokens == 20 * 7
    assert {row.row_id for row in scores.failed} == set(ids[:4])
    assert "was sorted as" in scores.failed[0].prompt[-1]["content"]
    check = next(c for c in verdict.checks if c.kind == "gate.min_judge_pass")
    assert check.observed == (
        "77.8% pass (14 of 18 judged; 95 % likely 54.8% to 91.0% in the run); "
        "2 of 20 sampled were not judged (invalid_output 2)"
    )
    merge(store, plan.folder)
    write_report(store, plan.folder)
    page = store.read_bytes(RunLayout(plan.folder).report("html")).decode()
    assert "<h2>The judge</h2>" in page
    assert "77.8% pass" in page


def test_what_the_judge_cost_stands_beside_what_the_run_cost(root: Path, store: Store) -> None:
    plan = answered(root, store, cost={"currency": "EUR", "per_million_output_tokens": 1e6})
    assert write_report(store, plan.folder).judge is None
    earlier = prepare_judge(store, plan.folder)
    commit_run(store, earlier, answer=lambda _: "right")
    split(
        store,
        judged_job(root, VERDICT | {"rows": 10}, cost={"currency": "EUR", "per_million_output_tokens": 1e6}),
        "run",
    )
    reconcile(store, plan.folder)
    asked = prepare_judge(store, plan.folder)
    assert asked.folder != earlier.folder
    report = write_report(store, plan.folder)
    assert report.judge is not None
    assert report.judge.tokens == Tokens(prompt=20 * 5, output=20 * 2), "it is not done, and was paid before"
    commit_run(store, asked, answer=lambda _: "right")
    validate(store, plan.folder)
    merge(store, plan.folder)

    report = write_report(store, plan.folder)
    assert report.judge == JudgeCost(
        runs=2, tokens=Tokens(prompt=30 * 5, output=30 * 2), held_seconds=0.0, cost=60.0
    )
    assert (report.tokens, report.cost) == (Tokens(prompt=100 * 5, output=100 * 2), 200.0)
    page = store.read_bytes(RunLayout(plan.folder).report("html")).decode()
    assert (
        "<b>210</b><span>more tokens paid to the judge: 150 prompt, 60 output, 0.0 s held, 60.0 EUR" in page
    )
    summary = check_run(store, plan.folder)
    assert (summary["tokens"], summary["judge_tokens"]) == (700, 210)


def test_a_run_without_a_judge_tells_nothing_of_one(root: Path, store: Store) -> None:
    write_input(root, [{"text": f"t{i}", "channel": "mail"} for i in range(3)])
    plan = split(store, job(root, store=str(root), input={"path": str(root / "in")}), "run")
    publish_run(store, plan)
    assert write_report(store, plan.folder).judge is None
    assert b"paid to the judge" not in store.read_bytes(RunLayout(plan.folder).report("html"))


@pytest.mark.parametrize("unread", [False, True])
def test_too_few_that_pass_hold_the_results(root: Path, store: Store, unread: bool) -> None:
    """So does a judge of which nothing could be read."""
    plan = answered(root, store, gate={"min_judge_pass": 0.5})
    asked = prepare_judge(store, plan.folder)
    commit_run(
        store, asked, answer=lambda _: "wrong", dead=lambda _: Reason.INVALID_OUTPUT if unread else None
    )
    found = "no row was judged; 20 of 20" if unread else r"0\.0% pass \(0 of 20"
    with pytest.raises(GateError, match=rf"answers that pass the judge: found {found}"):
        validate(store, plan.folder)
    with pytest.raises(GateError):
        merge(store, plan.folder)


@pytest.mark.parametrize("score", ["1e999", "-1e999", "1e200", "9" * 400])
def test_a_number_too_large_to_be_a_score_is_none(root: Path, store: Store, score: str) -> None:
    """It fits the schema and is durable: a run that it stopped could never be validated."""
    plan = answered(root, store, judge=SCORE)
    asked = prepare_judge(store, plan.folder)
    first = min(row["row_id"] for row in frozen_rows(store, asked))
    commit_run(store, asked, answer=lambda r: '{"score": %s}' % (score if r["row_id"] == first else "4"))
    scores = validate(store, plan.folder).judge
    assert scores is not None
    assert (scores.judged, scores.passed, scores.not_judged) == (19, 19, {"no_score": 1})
    assert (scores.mean, scores.mean_low, scores.mean_high) == (4.0, 4.0, 4.0)


def test_numbers_as_scores(root: Path, store: Store) -> None:
    plan = answered(root, store, SCORE)
    asked = prepare_judge(store, plan.folder)
    ids = sorted(row["row_id"] for row in frozen_rows(store, asked))
    replies = {ids[0]: "{}", ids[1]: '{"score": true}'}
    commit_run(
        store, asked, answer=lambda r: replies.get(r["row_id"], json.dumps({"score": 3 + r["row_id"] % 2}))
    )
    scores = validate(store, plan.folder).judge
    assert scores is not None
    values = [3 + i % 2 for i in ids[2:]]
    assert (scores.judged, scores.passed) == (18, values.count(4))
    assert scores.not_judged == {"no_score": 2}
    assert (scores.mean, scores.mean_low, scores.mean_high) == mean_interval([float(v) for v in values])
    assert scores.mean_low is not None
    assert scores.mean is not None
    assert scores.mean_low < scores.mean


def test_a_judge_that_is_not_done_is_waited_for(root: Path, store: Store) -> None:
    plan = answered(root, store)
    with pytest.raises(IncompleteRunError, match="clear prepare_judge"):
        validate(store, plan.folder)
    asked = prepare_judge(store, plan.folder)
    with pytest.raises(IncompleteRunError, match=r"the judge is not done: shard 0 .* clear judge"):
        validate(store, plan.folder)
    commit_run(store, asked, answer=lambda _: "right")
    assert validate(store, plan.folder).judge is not None


def test_what_was_judged_stays_judged(root: Path, store: Store) -> None:
    """A limit changes nothing; another rubric, or other answers, make another run."""
    plan = answered(root, store)
    asked = prepare_judge(store, plan.folder)

    def again(judge: dict[str, Any], **fields: Any) -> Plan:
        split(store, judged_job(root, judge, **fields), "run")
        reconcile(store, plan.folder)
        return prepare_judge(store, plan.folder)

    assert again(VERDICT | {"passing": ["wrong"]}, gate={"min_judge_pass": 0.5}).folder == asked.folder
    assert again(VERDICT | {"prompt": {"template": "Is {{ output }} right?"}}).folder != asked.folder
    assert again(VERDICT | {"seed": 1}).folder != asked.folder
    assert again(VERDICT).folder == asked.folder
    layout, shard = RunLayout(plan.folder), plan.shards[0]
    for info in store.list(layout.shard(0)):
        if info.key.endswith("commit.json"):
            store.delete(info.key)
    commit_shard(store, plan, shard, answer=lambda _: "bug")
    reconcile(store, plan.folder)
    assert prepare_judge(store, plan.folder).folder != asked.folder


def test_quarantined_answers_do_not_count(root: Path, store: Store) -> None:
    only_billing = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "output", "value_set": ["billing"]},
        "on_failure": "dead_letter",
    }
    plan = answered(
        root, store, validation={"expectations": [only_billing]}, failure={"max_dead_fraction": 0.5}
    )
    commit_run(store, prepare_judge(store, plan.folder), answer=lambda _: "right")
    scores = validate(store, plan.folder).judge
    assert scores is not None
    assert scores.sampled == 16


def test_no_good_answer_is_no_run(root: Path, store: Store) -> None:
    write_input(root, [{"text": f"t{i}", "channel": "mail"} for i in range(3)])
    plan = split(store, judged_job(root, VERDICT, failure={"max_dead_fraction": 1.0}), "run")
    commit_run(store, plan, dead=lambda _: Reason.TIMED_OUT)
    reconcile(store, plan.folder)
    assert prepare_judge(store, plan.folder).shards == []
    scores = validate(store, plan.folder).judge
    assert scores is not None
    assert scores.sentence() == "no row was judged"


def test_free_text_has_strata_by_length_and_housekeeping_leaves_the_judge_alone(
    root: Path, store: Store
) -> None:
    plan = answered(root, store, task={"type": "generate"})
    asked = prepare_judge(store, plan.folder)
    assert asked.rows == 20
    commit_run(store, asked, answer=lambda _: "right")
    assert delete_orphans(store, "job", timedelta(0)).objects == 0
    assert validate(store, plan.folder).judge is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"judge": VERDICT | {"passing": ["good"]}},
            r"judge: `passing` must name some of the labels right,",
        ),
        ({"judge": SCORE | {"min_score": None}}, r"judge: `task.type: json` needs `min_score`"),
        ({"judge": SCORE | {"score": "points"}}, r"judge: `score`: the schema has no property `points`"),
        ({"judge": VERDICT, "task": {"type": "embed"}}, r"`judge` is not for `task.type: embed`"),
        ({"gate": {"min_judge_pass": 0.5}, "judge": None}, r"`gate.min_judge_pass` needs `judge`"),
        (
            {"judge": VERDICT | {"prompt": {"template": "{{ output }} {{ colour }}"}}},
            r"judge\.prompt: reads the column `colour`, which the judge does not get; it gets text, channel",
        ),
        ({"judge": VERDICT | {"prompt": {"template": "{{ text }}"}}}, r"does not read the answer; write"),
        ({"judge": VERDICT, "prompt": {"template": "{{ output }}"}}, r"the input has a column `output`"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(
    root: Path, store: Store, changes: dict[str, Any], message: str
) -> None:
    write_input(root, [{"text": "t", "channel": "mail", "output": "o"}])
    fields = {"judge": VERDICT} | changes
    with pytest.raises(SpecError, match=message):
        split(store, judged_job(root, **fields), "run")
