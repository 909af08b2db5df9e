"""Drift: do this run's answers look like those of the job's last published run?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from airflow_batchinfer.errors import UnreadableError
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.histogram import Histogram
from airflow_batchinfer.pipeline.profile import Profile
from airflow_batchinfer.pipeline.published import last_published
from airflow_batchinfer.pipeline.statistics import jensen_shannon, population_stability, wilson
from airflow_batchinfer.pipeline.verdict import Check, Severity, Verdict
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import DriftSpec
from airflow_batchinfer.store import Store

_BINS = 10


def check_drift(store: Store, plan: Plan, profile: Profile) -> list[Check]:
    """Compare with the last published run of the job; nothing if there is none, or it is switched off.

    Replays, and incremental runs that keep results, answer rows that are no sample of the input: not
    compared. If what that run left cannot be read, that is a warning: this run's answers are none the worse
    for it.
    """
    limits = plan.spec.drift
    before = last_published(store, plan) if limits.enabled and plan.answers_whole_input else None
    if before is None:
        return []
    try:
        old = Verdict.find(store, RunLayout(before.folder).validation)
    except UnreadableError as error:
        return [_not_compared(before.run_id, error)]
    if old is None:  # its folder was cleaned up
        return []
    severity: Severity = "critical" if limits.on_drift == "hold" else "warning"
    return [
        check.model_copy(
            update={"severity": severity, "observed": f"{check.observed}, against {before.run_id}"}
        )
        for check in compare(old.profile, profile, limits)
    ]


def _not_compared(run_id: str, error: UnreadableError) -> Check:
    return Check(
        name="drift",
        kind="drift.enabled",
        origin="drift",
        severity="warning",
        success=False,
        observed=f"no comparison with {run_id}",
        error=str(error),
    )


def compare(before: Profile, after: Profile, limits: DriftSpec) -> Iterator[Check]:
    """One check for each figure that both runs have."""
    if before.labels and after.labels:
        yield _distribution(
            "labels", before.labels, after.labels, _mover(before.labels, after.labels), limits
        )
    for name, old, new in (
        ("output tokens", before.output_tokens, after.output_tokens),
        ("prompt tokens", before.prompt_tokens, after.prompt_tokens),
        ("vector norms (thousandths)", before.vector_norms, after.vector_norms),
    ):
        if old.count and new.count:
            words = f"median {old.quantile(0.5):,.0f} before, {new.quantile(0.5):,.0f} now"
            yield _distribution(name, *_binned(old, new), words, limits)
    for name, old_count, new_count in (
        (
            "rows that succeeded",
            before.counts.get(Outcome.SUCCEEDED, 0),
            after.counts.get(Outcome.SUCCEEDED, 0),
        ),
        ("refusals", before.refusals, after.refusals),
    ):
        if old_count or new_count:
            yield _share(name, old_count, before.rows, new_count, after.rows, limits)


def _distribution(
    name: str, before: Mapping[str, int], after: Mapping[str, int], words: str, limits: DriftSpec
) -> Check:
    index = population_stability(before, after)
    kinds = len(before.keys() | after.keys())
    # Small runs differ by chance: about so much, and twice that is not rare.
    chance = 2 * (kinds - 1) * (1 / max(1, sum(before.values())) + 1 / max(1, sum(after.values())))
    distance = jensen_shannon(before, after)
    return Check(
        name=f"drift of {name}",
        kind="drift.max_psi",
        origin="drift",
        success=index <= limits.max_psi + chance,
        observed=f"{words} (PSI {index:.2f}, Jensen-Shannon {distance:.2f})",
        required=f"PSI at most {limits.max_psi:g} (`drift.max_psi`)"
        + (f" and {chance:.2f} by chance" if chance >= 0.005 else ""),
    )


def _share(name: str, old: int, old_rows: int, new: int, new_rows: int, limits: DriftSpec) -> Check:
    """A change counts if it is larger than the limit and than what chance explains."""
    before, after = old / max(1, old_rows), new / max(1, new_rows)
    (old_low, old_high), (new_low, new_high) = wilson(old, old_rows), wilson(new, new_rows)
    apart = new_low > old_high or new_high < old_low
    return Check(
        name=f"drift of {name}",
        kind="drift.max_validity_change",
        origin="drift",
        success=abs(after - before) <= limits.max_validity_change or not apart,
        observed=f"{before:.1%} before, {after:.1%} now",
        required=f"a change of at most {limits.max_validity_change:.1%} (`drift.max_validity_change`)",
    )


def _mover(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The label whose share changed most, in words."""
    old, new = max(1, sum(before.values())), max(1, sum(after.values()))
    label = max(
        sorted(before.keys() | after.keys()),
        key=lambda k: abs(after.get(k, 0) / new - before.get(k, 0) / old),
    )
    return f"`{label}` {before.get(label, 0) / old:.1%} before, {after.get(label, 0) / new:.1%} now"


def _binned(before: Histogram, after: Histogram) -> tuple[dict[str, int], dict[str, int]]:
    """Both histograms over tenths of the earlier one."""
    cuts = sorted({before.quantile(i / _BINS) for i in range(1, _BINS)})
    edges = [float("-inf"), *cuts, float("inf")]

    def counts(values: Histogram) -> dict[str, int]:
        return {
            str(low): sum(n for edge, n in values.buckets.items() if low < edge <= high)
            for low, high in pairwise(edges)
        }

    return counts(before), counts(after)
