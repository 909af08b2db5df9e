from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import GateError, IncompleteRunError, SpecError
from airflow_batchinfer.pipeline.expectations import check_expectations
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.pipeline.verdict import Check, Verdict
from airflow_batchinfer.run.plan import ReplayOf
from tests.unit.quality.runs import LABELS, make_run, make_spec, tickets

pytestmark = pytest.mark.airflow_env


def check(verdict: Verdict, kind: str) -> Check:
    return next(c for c in verdict.checks if c.kind == kind)


def test_good_run_passes_and_the_verdict_is_kept(root: Path) -> None:
    run = make_run(root, tickets(30), copies_of={1: 0})
    ledger = run.reconcile()
    verdict = validate(run.store, run.folder)
    assert verdict.success
    assert verdict.publish
    assert verdict.ledger_sha256 == ledger.digest()
    assert verdict.rows_checked == 30
    assert check(verdict, "expect_column_values_to_be_in_set").checked == 30
    assert Verdict.read(run.store, run.layout.validation) == verdict
    kept = json.loads(run.store.read_bytes(run.layout.expectations("shard-00000")))
    assert {r["expectation_config"]["type"] for r in kept} >= {"expect_column_values_to_be_in_set"}


def test_a_label_outside_the_set_holds_the_results(root: Path) -> None:
    run = make_run(root, tickets(30), lambda r: {"output": "spam" if r["id"] == "T17" else r["label"]})
    run.reconcile()
    with pytest.raises(GateError, match=r"output: values to be in set.*1 of 30 values fail.*row_id 17"):
        validate(run.store, run.folder)
    verdict = Verdict.read(run.store, run.layout.validation)
    assert not verdict.publish
    assert not verdict.success


LONG_LINES = "x\n[2026] INFO all fine" + "y" * 10_000


def test_row_text_cannot_forge_lines_of_the_log_nor_fill_it(root: Path) -> None:
    run = make_run(root, tickets(30), lambda _: {"output": LONG_LINES})
    run.reconcile()
    with pytest.raises(GateError) as raised:
        validate(run.store, run.folder)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 2_000
    found = check(Verdict.read(run.store, run.layout.validation), "expect_column_values_to_be_in_set")
    assert max(len(str(example)) for example in found.examples) < 500
    assert len(run.store.read_bytes(run.layout.data_docs)) < 100_000


def test_what_was_observed_of_texts_is_one_short_line(root: Path) -> None:
    own = {
        "type": "expect_column_most_common_value_to_be_in_set",
        "kwargs": {"column": "output", "value_set": ["bug"]},
    }
    spec = make_spec(root, task={"type": "generate"}, validation={"expectations": [own]})
    run = make_run(root, tickets(30), lambda r: {"output": r["id"] + LONG_LINES}, spec=spec)
    run.reconcile()
    with pytest.raises(GateError) as raised:
        validate(run.store, run.folder)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 2_000


def test_warn_publishes_and_says_so(root: Path) -> None:
    spec = make_spec(root, validation={"on_failure": "warn"})
    run = make_run(root, tickets(30), lambda _: {"output": "spam"}, spec=spec)
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert verdict.publish
    assert not verdict.success
    assert verdict.message.startswith("Published with warnings: ")


def test_a_warning_severity_does_not_hold(root: Path) -> None:
    own = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "channel", "value_set": ["chat"]},
        "severity": "warning",
    }
    run = make_run(root, tickets(30), spec=make_spec(root, validation={"expectations": [own]}))
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert verdict.success
    assert verdict.message.startswith("Passed with warnings: channel: values to be in set")


@pytest.mark.parametrize(("mostly", "passes"), [(0.9, True), (0.91, False)])
def test_mostly_counts_over_the_run_not_shard_by_shard(root: Path, mostly: float, passes: bool) -> None:
    own = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "output", "value_set": ["bug", "praise"], "mostly": mostly},
    }
    # All three of the run's bad rows stand in one shard, where they are 30 %.
    run = make_run(
        root,
        tickets(30),
        lambda r: {"output": "billing" if int(r["id"][1:]) < 3 else "bug"},
        spec=make_spec(root, validation={"expectations": [own]}),
    )
    run.reconcile()
    if passes:
        assert validate(run.store, run.folder).success
    else:
        with pytest.raises(GateError, match=r"3 of 30 values fail, required at least 91.0%"):
            validate(run.store, run.folder)


def test_aggregates_are_judged_on_the_whole_run(root: Path) -> None:
    own = {
        "type": "expect_column_mean_to_be_between",
        "kwargs": {"column": "output_tokens", "min_value": 14, "max_value": 15},
    }
    # Means of the shards are 4.5, 14.5 and 24.5; that of the run is 14.5.
    run = make_run(
        root,
        tickets(30),
        lambda r: {"output": r["label"], "output_tokens": int(r["id"][1:])},
        spec=make_spec(root, validation={"expectations": [own]}),
    )
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert check(verdict, "expect_column_mean_to_be_between").observed == "14.5"


def test_dead_letters_over_the_limit_name_the_reason_and_rows(root: Path) -> None:
    spec = make_spec(root, failure={"max_dead_fraction": 0.1})

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        i = int(row["id"][1:])
        if i < 5:
            return {"reason": "over_long", "message": "9,000 tokens do not fit"}
        return {"reason": "empty_output"} if i == 20 else {"output": row["label"]}

    run = make_run(root, tickets(30), answer, spec=spec)
    run.reconcile()
    with pytest.raises(GateError) as raised:
        validate(run.store, run.folder)
    message = str(raised.value)
    assert "20.0% of rows (6 of 30), mostly over_long (5)" in message
    assert "at most 10.0% (`failure.max_dead_fraction`)" in message
    assert message.count("9,000 tokens do not fit") == 3


def test_limit_of_one_reason(root: Path) -> None:
    spec = make_spec(root, failure={"max_dead_fraction": 1.0, "max_dead_by_reason": {"over_long": 0.05}})
    run = make_run(
        root,
        tickets(30),
        lambda r: {"reason": "over_long"} if r["id"] in ("T1", "T2") else {"output": r["label"]},
        spec=spec,
    )
    run.reconcile()
    with pytest.raises(GateError, match=r"dead letters: over_long: found 6.7% of rows"):
        validate(run.store, run.folder)


def test_broken_limits_hold_even_if_expectations_only_warn(root: Path) -> None:
    spec = make_spec(root, failure={"max_dead_fraction": 0.0}, validation={"on_failure": "warn"})
    run = make_run(
        root,
        tickets(9),
        lambda r: {"reason": "empty_output"} if r["id"] == "T1" else {"output": r["label"]},
        spec=spec,
    )
    run.reconcile()
    with pytest.raises(GateError, match="Results held back: dead letters"):
        validate(run.store, run.folder)


def test_incomplete_run_is_not_judged(root: Path) -> None:
    run = make_run(root, tickets(9), uncommitted=[0])
    with pytest.raises(IncompleteRunError, match="reconcile first"):
        validate(run.store, run.folder)
    run.reconcile()
    with pytest.raises(IncompleteRunError, match="shard 0000 has no commit"):
        validate(run.store, run.folder)


def test_switched_off_checks_only_the_limits(root: Path) -> None:
    spec = make_spec(root, validation={"enabled": False})
    run = make_run(root, tickets(9), lambda _: {"output": "spam"}, spec=spec)
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert [c.kind for c in verdict.checks] == ["failure.max_dead_fraction"]


def test_only_a_sample_of_a_large_shard_is_checked(root: Path) -> None:
    spec = make_spec(root, validation={"sample_rows": 5})
    run = make_run(root, tickets(30), spec=spec)
    run.reconcile()
    assert validate(run.store, run.folder).rows_checked == 15


def test_json_answers_are_checked_against_schema_and_properties(root: Path) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    own = {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "output.score", "min_value": 0, "max_value": 5},
    }
    spec = make_spec(root, task={"type": "json", "schema": schema}, validation={"expectations": [own]})
    run = make_run(root, tickets(9), lambda r: {"output": json.dumps({"score": int(r["id"][1:])})}, spec=spec)
    run.reconcile()
    with pytest.raises(GateError, match=r"output\.score: values to be between: found 3 of 9 values fail"):
        validate(run.store, run.folder)
    verdict = Verdict.read(run.store, run.layout.validation)
    assert next(c for c in verdict.checks if c.name == "output fault: values to be null").success


@pytest.mark.parametrize("on_failure", ["hold", "dead_letter"])
def test_a_carried_column_named_as_a_property_is_not_taken_for_it(root: Path, on_failure: str) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    own = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "output.score", "value_set": [1]},
        "on_failure": on_failure,
    }
    given = {"path": "tickets.parquet", "id_column": "id", "carry": ["output.score"]}
    task = {"type": "json", "schema": schema}
    spec = make_spec(root, input=given, task=task, validation={"expectations": [own]})
    rows = [{**ticket, "output.score": 7} for ticket in tickets(9)]
    run = make_run(root, rows, lambda _: {"output": '{"score": 1}'}, spec=spec)
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert (verdict.success, verdict.quarantine.rows) == (True, 0)


LETTERS = {"type": "object", "properties": {"fault": {"type": "string", "pattern": r"^\p{L}+$"}}}


@pytest.mark.parametrize(
    ("task", "good", "bad", "fault"),
    [
        ({"type": "regex", "pattern": "[a-z]{1,2000}"}, "a" * 1500, "a1", "does not match task.pattern"),
        ({"type": "regex", "pattern": r"(?x) \d+ # a number"}, "12", "x", "does not match task.pattern"),
        ({"type": "regex", "pattern": r"(?i)\w+"}, "Straße", "a b", "does not match task.pattern"),
        (
            {"type": "json", "schema": LETTERS},
            '{"fault": "Öl"}',
            '{"fault": "1"}',
            r"\$\.fault: '1' does not",
        ),
    ],
)
def test_answers_are_proven_by_what_the_worker_judged_them_by(
    root: Path, task: dict[str, Any], good: str, bad: str, fault: str
) -> None:
    run = make_run(root, tickets(9), lambda _: {"output": good}, spec=make_spec(root, task=task))
    run.reconcile()
    assert validate(run.store, run.folder).success
    broken = make_run(
        root,
        tickets(9),
        lambda r: {"output": bad if r["id"] == "T5" else good},
        spec=make_spec(root, task=task),
        run_id="manual-2",
    )
    broken.reconcile()
    with pytest.raises(GateError, match=rf"1 of 9 values fail.*output fault .*{fault}.*, row_id 5"):
        validate(broken.store, broken.folder)


def test_vectors_of_different_length_are_found(root: Path) -> None:
    spec = make_spec(root, task={"type": "embed"}, input={"path": "x.parquet"})
    run = make_run(
        root,
        tickets(9),
        lambda r: {"vector": [0.6, 0.8] if r["id"] != "T5" else [1.0, 0.0, 0.0]},
        spec=spec,
    )
    run.reconcile()
    with pytest.raises(GateError, match=r"output.length: unique value count to be between: found 2"):
        validate(run.store, run.folder)


def test_accuracy_below_the_limit_holds(root: Path) -> None:
    spec = make_spec(root, validation={"min_accuracy": 0.9})
    run = make_run(root, tickets(30), lambda _: {"output": "bug"}, spec=spec)
    run.reconcile()
    with pytest.raises(GateError, match=r"accuracy against `label`: found 33.3% \(10 of 30 rows\)"):
        validate(run.store, run.folder)


@pytest.mark.parametrize("output", [{"column": "answer"}, {"carry_prefix": "in_"}])
def test_a_truth_column_named_as_the_answer_is_not_taken_for_it(root: Path, output: dict[str, str]) -> None:
    """Both remedies that split names for such a column."""
    rows = [{**t, "output": t["label"]} for t in tickets(30)]
    given = {"path": "tickets.parquet", "id_column": "id", "truth": "output"}
    spec = make_spec(root, input=given, output=output, validation={"min_accuracy": 0.9})
    run = make_run(root, rows, lambda _: {"output": "bug"}, spec=spec, copies_of={3: 0})
    run.reconcile()
    with pytest.raises(GateError, match=r"accuracy against `output`: found 33.3% \(10 of 30 rows\)"):
        validate(run.store, run.folder)


def test_suite_file_is_read(root: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(
        json.dumps(
            {
                "name": "mine",
                "expectations": [
                    {
                        "type": "expect_column_values_to_be_in_set",
                        "kwargs": {"column": "channel", "value_set": ["mail"]},
                        "meta": {"note": "kept by GX"},
                    }
                ],
            }
        )
    )
    run = make_run(root, tickets(9), spec=make_spec(root, validation={"suite": str(suite)}))
    run.reconcile()
    assert [c.name for c in validate(run.store, run.folder).checks if c.origin == "suite"] == [
        "channel: values to be in set"
    ]


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        (
            {"type": "expect_column_values_to_be_in_sett", "kwargs": {"column": "output"}},
            r"validation\.expectations\.0\.type: .*no `expect_column_values_to_be_in_sett`; "
            r"did you mean `expect_column_values_to_be_in_set`\?",
        ),
        (
            {"type": "expect_column_values_to_be_in_set", "kwargs": {"colum": "output", "value_set": []}},
            r"validation\.expectations\.0\.kwargs: .*`column`: field required; `colum`: extra fields",
        ),
        (
            {
                "type": "expect_column_values_to_be_in_set",
                "kwargs": {"column": "output", "value_set": ["a"], "mostly": 3},
            },
            r"`mostly`: ensure this value is less than or equal to 1",
        ),
        (
            {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 900_000}},
            r"expectations\.0\.type: `expect_table_row_count_to_be_between` .* `failure\.max_dead_fraction`",
        ),
        (
            {"type": "expect_table_columns_to_match_set", "kwargs": {"column_set": ["output"]}},
            r"expectations\.0\.type: `expect_table_columns_to_match_set` .* the columns that the spec says",
        ),
        (
            {
                "type": "expect_column_sum_to_be_between",
                "kwargs": {"column": "output_tokens", "max_value": 9},
            },
            r"expectations\.0\.type: `expect_column_sum_to_be_between` .* use `expect_column_mean_to_be_b",
        ),
        (
            {
                "type": "unexpected_rows_expectation",
                "kwargs": {"unexpected_rows_query": "SELECT * FROM {batch}"},
            },
            r"expectations\.0: Great Expectations cannot evaluate `unexpected_rows_expectation` .*PandasExec",
        ),
        (
            {
                "type": "expect_column_values_to_match_like_pattern",
                "kwargs": {"column": "channel", "like_pattern": "m%"},
            },
            r"expectations\.0: Great Expectations cannot evaluate `expect_column_values_to_match_like_",
        ),
        (
            {
                "type": "expect_column_values_to_match_regex",
                "kwargs": {"column": "output", "regex": "a{1,2000}"},
            },
            r"expectations\.0: Great Expectations cannot evaluate .*invalid repetition size",
        ),
        (
            {
                "type": "expect_column_values_to_match_json_schema",
                "kwargs": {"column": "output", "json_schema": {"type": "text"}},
            },
            r"expectations\.0: Great Expectations cannot evaluate .*'text' is not valid",
        ),
        (
            {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "answer"}},
            r"kwargs\.column: the results have no column `answer` \(they have: row_id, .*`input\.carry`",
        ),
        ({"kwargs": {"column": "output"}}, r"an expectation is `\{type: expect_"),
        (
            {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "output"}, "mostly": 1},
            r"validation\.expectations\.0\.mostly: unknown field",
        ),
    ],
)
def test_wrong_expectations_are_refused_before_anything_runs(
    root: Path, expectation: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_expectations(make_spec(root, validation={"expectations": [expectation]}))


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("expect_column_distinct_values_to_contain_set", {"column": "channel", "value_set": ["mail"]}),
        ("expect_column_distinct_values_to_equal_set", {"column": "channel", "value_set": ["mail"]}),
        ("expect_column_max_to_be_between", {"column": "output_tokens", "max_value": 5}),
        ("expect_column_mean_to_be_between", {"column": "output_tokens", "max_value": 5}),
        ("expect_column_median_to_be_between", {"column": "output_tokens", "max_value": 5}),
        ("expect_column_stdev_to_be_between", {"column": "output_tokens", "max_value": 5}),
        ("expect_column_most_common_value_to_be_in_set", {"column": "channel", "value_set": ["mail"]}),
        ("expect_column_proportion_of_unique_values_to_be_between", {"column": "row_id", "min_value": 1}),
        ("expect_column_proportion_of_non_null_values_to_be_between", {"column": "channel", "min_value": 1}),
        ("expect_column_unique_value_count_to_be_between", {"column": "channel", "max_value": 1}),
        (
            "expect_column_quantile_values_to_be_between",
            {"column": "output_tokens", "quantile_ranges": {"quantiles": [0.5], "value_ranges": [[1, 5]]}},
        ),
        (
            "expect_column_kl_divergence_to_be_less_than",
            {
                "column": "channel",
                "partition_object": {"values": ["mail", "chat"], "weights": [0.99, 0.01]},
                "threshold": 1,
            },
        ),
        (
            "expect_column_kl_divergence_to_be_less_than",
            {
                "column": "output_tokens",
                "partition_object": {"bins": [0, 2, 4, 8], "weights": [0.01, 0.98, 0.01]},
                "threshold": 1,
            },
        ),
        ("expect_column_to_exist", {"column": "channel"}),
        ("expect_column_value_lengths_to_equal", {"column": "channel", "value": 4}),
        (
            "expect_column_value_z_scores_to_be_less_than",
            {"column": "row_id", "threshold": 3, "double_sided": True},
        ),
        ("expect_column_values_to_be_between", {"column": "output_tokens", "max_value": 5}),
        ("expect_column_values_to_be_increasing", {"column": "row_id"}),
        ("expect_column_values_to_be_of_type", {"column": "row_id", "type_": "int64"}),
        ("expect_column_values_to_match_regex", {"column": "channel", "regex": "^m(?!b)"}),
        (
            "expect_column_pair_values_a_to_be_greater_than_b",
            {"column_A": "prompt_tokens", "column_B": "attempts"},
        ),
        ("expect_compound_columns_to_be_unique", {"column_list": ["row_id", "channel"]}),
        ("expect_multicolumn_sum_to_equal", {"column_list": ["output_tokens", "attempts"], "sum_total": 4}),
        (
            "expect_column_values_to_not_be_null",
            {"column": "channel", "row_condition": "attempts > 0", "condition_parser": "pandas"},
        ),
    ],
)
def test_expectations_that_hold_are_neither_refused_nor_broken(
    root: Path, kind: str, kwargs: dict[str, Any]
) -> None:
    spec = make_spec(root, validation={"expectations": [{"type": kind, "kwargs": kwargs}]})
    check_expectations(spec)
    run = make_run(root, tickets(9), spec=spec)
    run.reconcile()
    verdict = validate(run.store, run.folder)
    assert [(c.success, c.error) for c in verdict.checks if c.origin == "spec"] == [(True, None)]


def test_missing_suite_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"validation\.suite: nowhere\.json is not there\. .* clear split"):
        check_expectations(make_spec(root, validation={"suite": "nowhere.json"}))
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(SpecError, match=r"validation\.suite: .*cut\.json cannot be read as JSON"):
        check_expectations(make_spec(root, validation={"suite": str(tmp_path / "cut.json")}))


def test_labels_are_scored(root: Path) -> None:
    # T0, T3, ... are billing, but every second of them is answered as a bug.
    def answer(row: dict[str, Any]) -> dict[str, Any]:
        wrong = row["label"] == "billing" and int(row["id"][1:]) % 2
        return {"output": "bug" if wrong else row["label"]}

    run = make_run(root, tickets(24), answer)
    run.reconcile()
    scores = validate(run.store, run.folder).labels
    assert scores is not None
    assert scores.labels == LABELS
    assert scores.matrix == [[4, 4, 0], [0, 8, 0], [0, 0, 8]]
    assert scores.accuracy == 20 / 24
    billing, bug, _ = scores.scores
    assert (billing.precision, billing.recall) == (1.0, 0.5)
    assert (bug.precision, bug.recall) == (8 / 12, 1.0)


def two_dead(row: dict[str, Any]) -> dict[str, Any]:
    return {"reason": "empty_output"} if row["id"] in ("T1", "T2") else {"output": row["label"]}


def test_rows_that_keep_their_result_count_for_the_limit(root: Path) -> None:
    spec = make_spec(root, failure={"max_dead_fraction": 0.05})
    run = make_run(root, tickets(10), two_dead, spec=spec)
    ledger = run.reconcile()
    with pytest.raises(GateError):
        validate(run.store, run.folder)
    ledger.model_copy(update={"kept_rows": 90}).write(run.store, run.layout.ledger)
    assert "2 of 100" in check(validate(run.store, run.folder), "failure.max_dead_fraction").observed


def test_a_replay_is_not_held_for_what_stays_dead(root: Path) -> None:
    spec = make_spec(root, failure={"max_dead_fraction": 0.05})
    run = make_run(root, tickets(10), two_dead, spec=spec)
    home = ReplayOf(run_id="r", folder="f", generation=1, created_at="", fingerprint="x", reasons=[])
    run.plan.model_copy(update={"replay_of": home}).write(run.store, run.layout.plan)
    run.reconcile()
    assert validate(run.store, run.folder).publish
