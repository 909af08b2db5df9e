"""Bundles: the shards of one mapped task, as they travel through XCom. Counts and addresses only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from airflow.sdk import conf

from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.spec import MAX_MAPPED_TASKS
from airflow_batchinfer.store import Store

LABEL_VARIABLE = "shard_label"
"""Context variable of the infer tasks that `map_index_template` shows."""


class RunAddress(TypedDict):
    """Where a run stands: what every task after `split` needs to know."""

    store: str
    storage_options: dict[str, str]
    folder: str


class Bundle(RunAddress):
    """One mapped task's share of a run. `rows` and `tokens` are for people; the plan decides."""

    shards: list[int]
    rows: int
    tokens: int


def address_of(store: Store, plan: Plan) -> RunAddress:
    """The address of a plan's run."""
    return {"store": store.uri, "storage_options": store.options(), "folder": plan.folder}


def bundles_of(
    store: Store, plan: Plan, max_tasks: int, shards: Sequence[PlannedShard] | None = None
) -> list[Bundle]:
    """A plan's shards, `sharding.shards_per_task` to a bundle; more if there were more than `max_tasks`.

    Args:
        shards: some of the plan's shards; all by default.
    """
    chosen = plan.shards if shards is None else shards
    size = max(plan.spec.sharding.shards_per_task, -(-len(chosen) // max_tasks))
    address = address_of(store, plan)
    return [_bundle(address, chosen[i : i + size]) for i in range(0, len(chosen), size)]


def max_mapped_tasks() -> int:
    """Airflow fails a task that returns a longer list to map over."""
    return min(MAX_MAPPED_TASKS, conf.getint("core", "max_map_length", fallback=MAX_MAPPED_TASKS))


def label(bundle: Bundle) -> str:
    """How the task reads in the UI: `shard 0003 · 64 rows · 38k tokens`."""
    shards = bundle["shards"]
    which = f"shard {shards[0]:04d}" if len(shards) == 1 else f"shards {shards[0]:04d}-{shards[-1]:04d}"
    return f"{which} · {bundle['rows']:,} rows · {_short(bundle['tokens'])} tokens"


def _bundle(address: RunAddress, shards: Sequence[PlannedShard]) -> Bundle:
    return {
        **address,
        "shards": [s.shard for s in shards],
        "rows": sum(s.rows for s in shards),
        "tokens": sum(s.predicted_tokens for s in shards),
    }


def _short(count: int) -> str:
    """Three digits at most: 950, 1.2k, 38k, 4.1M."""
    for limit, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= limit:
            scaled = count / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return str(count)
