from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airflow_batchinfer.errors import GateError, IncompleteRunError
from airflow_batchinfer.pipeline.pilot import PilotVerdict, judge_pilot, read_pilot
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.pipeline.statistics import jensen_shannon, population_stability, wilson
from airflow_batchinfer.run.commit import Tokens
from tests.unit.quality.runs import MadeRun, make_run, make_spec, tickets, truthful

pytestmark = pytest.mark.airflow_env


def piloted(root: Path, answer: Any = truthful, rows: int = 50, shards: int = 5, **spec: Any) -> MadeRun:
    """A run whose shard 0, a fifth of it, is the pilot, and the only one that ran."""
    job = make_spec(root, **{"pilot": {"rows": rows // shards}, **spec})
    others = range(1, shards)
    return make_run(root, tickets(rows), answer, spec=job, shards=shards, pilot=True, uncommitted=others)


def test_good_pilot_passes_and_is_kept(root: Path) -> None:
    run = piloted(root)
    verdict = judge_pilot(run.store, run.folder)
    assert verdict.success
    assert verdict.message.startswith(
        "The pilot passed: 10 of 10 rows succeeded; forecast for the run: 1,650"
    )
    assert read_pilot(run.store, run.folder) == verdict


def test_broken_template_stops_the_run_with_evidence(root: Path) -> None:
    run = piloted(
        root, lambda row: {"reason": "invalid_output", "output": "Sure! ...", "message": "none of the labels"}
    )
    with pytest.raises(GateError) as raised:
        judge_pilot(run.store, run.folder)
    message = str(raised.value)
    assert "100.0% (10 of 10; 72% to 100% in the run), mostly invalid_output (10)" in message
    assert "at most 25.0% (`gate.max_dead_fraction`)" in message
    assert "Spent 330 tokens, saved about 1,320" in message
    assert "prompt 'Ticket: ticket " in message
    assert "gave 'Sure! ...'" in message
    kept = PilotVerdict.read(run.store, run.layout.pilot)
    assert not kept.success
    assert len(kept.worst) == 5
    assert kept.worst[0].prompt[0] == {"role": "system", "content": "You sort tickets."}
    assert write_report(run.store, run.folder).status == "stopped"
    assert not run.store.exists(run.layout.review("csv")), "nobody reviews a run that never ran"


def test_what_a_killed_attempt_paid_is_spent_too(root: Path) -> None:
    run = piloted(root)
    run.lose_attempt(0, Tokens(prompt=500, output=7))
    assert judge_pilot(run.store, run.folder).spent_tokens == 10 * 33 + 507


def test_row_text_cannot_forge_lines_of_the_log(root: Path) -> None:
    text = "x\n[2026] INFO all fine"
    run = piloted(root, lambda row: {"reason": "invalid_output", "output": text, "message": text})
    with pytest.raises(GateError) as raised:
        judge_pilot(run.store, run.folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("gate", "answer", "fault"),
    [
        ({"max_empty_fraction": 0.1}, {"reason": "empty_output", "output": ""}, "blank outputs: 100.0%"),
        (
            {"max_length_fraction": 0.1},
            {"output": "bug", "finish_reason": "length"},
            "answers cut at `sampling.max_tokens`: 100.0%",
        ),
        ({"max_identical_fraction": 0.9}, {"output": "bug"}, "rows with the most frequent output: 100.0%"),
        ({"min_accuracy": 0.5}, {"output": "bug"}, r"accuracy against `label`: 30.0%"),
        ({"max_tokens": 1000}, {"output": "bug"}, "forecast tokens: 1,650"),
    ],
)
def test_each_limit(root: Path, gate: dict[str, Any], answer: dict[str, Any], fault: str) -> None:
    run = piloted(root, lambda _: answer, gate={"max_dead_fraction": None, **gate})
    with pytest.raises(GateError) as raised:
        judge_pilot(run.store, run.folder)
    assert fault in str(raised.value)


def test_copies_do_not_hide_that_all_answers_are_one(root: Path) -> None:
    job = make_spec(root, pilot={"rows": 10}, gate={"max_identical_fraction": 0.9})
    copies = dict.fromkeys(range(4, 10), 0)
    run = make_run(
        root, tickets(50), lambda _: {"output": "bug"}, spec=job, shards=5, pilot=True, copies_of=copies
    )
    with pytest.raises(GateError, match=r"sent rows with the most frequent output: 100\.0% \(4 of 4;"):
        judge_pilot(run.store, run.folder)


def test_refusals_are_recognised(root: Path) -> None:
    run = piloted(
        root,
        lambda row: {"output": "I'm sorry, but I can't help with that." if row["id"] < "T5" else "Fine."},
        task={"type": "generate"},
        gate={"max_refusal_fraction": 0.3},
    )
    with pytest.raises(GateError, match=r"refusals: 50\.0%"):
        judge_pilot(run.store, run.folder)


def test_unfinished_pilot_is_not_judged(root: Path) -> None:
    job = make_spec(root, pilot={"rows": 10})
    run = make_run(root, tickets(50), spec=job, shards=5, pilot=True, uncommitted=range(5))
    with pytest.raises(IncompleteRunError, match=r"the pilot \(shard 0000 .* has no commit"):
        judge_pilot(run.store, run.folder)


def test_plan_without_pilot_passes(root: Path) -> None:
    run = make_run(root, tickets(9))
    assert judge_pilot(run.store, run.folder).success


def test_forecast_of_time_and_money(root: Path) -> None:
    # A worker that needs 30 s to start and then does ten tokens a second, one row every 3.3 s.
    run = piloted(
        root,
        lambda row: {"output": row["label"], "at": 50 + 3.3 * int(row["id"][1:])},
        rows=500,
        shards=5,
        cost={"per_hour": 3.6, "per_million_output_tokens": 100.0},
    )
    found = judge_pilot(run.store, run.folder).forecast
    assert found is not None
    assert found.tokens.expected == 500 * 33
    assert found.startup_seconds == pytest.approx(30)
    assert found.tokens_per_second == pytest.approx(10)
    # The pilot's 40 s, four tasks' starts, and 400 rows' tokens at that rate.
    assert found.held_seconds is not None
    assert found.held_seconds.expected == pytest.approx(40 + 4 * 30 + 400 * 3.3)
    assert found.wall_seconds is not None
    assert found.wall_seconds.expected == pytest.approx(40 + (4 * 30 + 400 * 3.3) / 4)
    assert found.cost is not None
    assert found.cost.expected == pytest.approx(found.held_seconds.expected / 1000 + 1500 * 100 / 1e6)
    assert found.held_seconds.low <= found.held_seconds.expected <= found.held_seconds.high


def test_forecast_holds_the_truth_nine_times_in_ten(root: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    inside = 0
    for trial in range(20):
        lengths = np.clip(draw.lognormal(4, 0.8, 1000), 1, None).astype(int)
        run = piloted(
            tmp_path / str(trial),
            lambda row, lengths=lengths: {
                "output": row["label"],
                "output_tokens": int(lengths[int(row["id"][1:])]),
            },
            rows=1000,
            shards=5,
        )
        found = judge_pilot(run.store, run.folder).forecast
        assert found is not None
        inside += found.output_tokens.low <= lengths.sum() <= found.output_tokens.high
    assert inside >= 17


def test_forecast_of_a_large_pilot_is_drawn_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = piloted(root, lambda row: {"output": row["label"], "output_tokens": int(row["id"][1:]) + 1})
    whole = judge_pilot(run.store, run.folder).forecast
    monkeypatch.setattr("airflow_batchinfer.pipeline.forecast._DRAWN_AT_ONCE", 35)
    assert judge_pilot(run.store, run.folder).forecast == whole


def test_wilson_interval_of_textbook() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_distances_of_distributions() -> None:
    same = {"a": 500, "b": 500}
    assert population_stability(same, same) == 0.0
    assert jensen_shannon(same, same) == 0.0
    assert population_stability(same, {"a": 900, "b": 100}) > 0.2
    assert population_stability(same, {"a": 510, "b": 490}) < 0.01
    assert jensen_shannon({"a": 1}, {"b": 1}) == 1.0
