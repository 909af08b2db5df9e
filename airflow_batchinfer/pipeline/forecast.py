"""Forecast of a whole run from its pilot: tokens, held time and money, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt
from pydantic import Field

from airflow_batchinfer.pipeline.answers import ShardAnswers
from airflow_batchinfer.run.commit import Commit, Tokens
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import CostSpec

_RESAMPLES = 2_000
_DRAWN_AT_ONCE = 500_000
"""Rows of the pilot, so that memory does not follow its size."""
_LOW, _HIGH = 0.05, 0.95
_SLICES = 8
"""Stretches of the pilot whose speeds tell how steady its rate was."""

Numbers = npt.NDArray[np.float64]


class Interval(Document):
    """An estimate and the range that holds it nine times in ten, as far as the pilot can tell."""

    low: float
    expected: float
    high: float

    def plus(self, known: float) -> Interval:
        """The estimate with a known amount added."""
        return Interval(low=self.low + known, expected=self.expected + known, high=self.high + known)


class Forecast(Document):
    """The whole run, the pilot's own part included."""

    pilot_rows: int = Field(description="Rows that the pilot sent.")
    sent_rows: int = Field(description="Rows that the run sends in all.")
    prompt_tokens: Interval
    output_tokens: Interval
    tokens: Interval
    startup_seconds: float | None = Field(description="From a worker's start to its first finished row.")
    tokens_per_second: float | None = Field(description="Of the pilot's worker, once it ran.")
    held_seconds: Interval | None = Field(description="Worker time; none if the pilot was too short.")
    wall_seconds: Interval | None = Field(description="At the job's parallelism, without waiting.")
    parallel: int = Field(description="Workers at once, for `wall_seconds`.")
    cost: Interval | None = Field(description="None without `cost` in the job.")
    currency: str = ""


def forecast(plan: Plan, pilot: ShardAnswers) -> Forecast:
    """Extrapolate from a pilot that is committed.

    Tokens scale with the rows still to be sent, and their interval comes from resampling the pilot's
    rows. Held time is the tokens at the pilot's rate, plus a start for each task; its interval adds how
    unsteady that rate was. A pilot is short, so its rate leans to the low side.

    Raises:
        CorruptError: a part cannot be read.
    """
    assert pilot.commit is not None
    table = pilot.answers(["prompt_tokens", "output_tokens", "cached_tokens", "finished_at"])
    prompt = table["prompt_tokens"].to_numpy().astype(np.float64)
    output = table["output_tokens"].to_numpy().astype(np.float64)
    fleet = [s for s in plan.shards if s.shard != pilot.planned.shard]
    rest = sum(s.sent for s in fleet)
    seed = plan.spec.pilot.seed if plan.spec.pilot else 0
    prompts, outputs, both = _extrapolate(np.stack([prompt, output, prompt + output]), rest, seed)
    tokens = both.plus(float((prompt + output).sum()))

    finished = np.sort(table["finished_at"].to_numpy().astype("datetime64[ms]").astype(np.float64)) / 1000
    order = np.argsort(table["finished_at"].to_numpy())
    startup, rate = _speed(pilot.commit, finished, (prompt + output)[order])
    tasks = math.ceil(len(fleet) / plan.spec.sharding.shards_per_task)
    parallel = max(1, min(plan.spec.sharding.max_parallel_shards, tasks))
    held = _held(both, rate, startup, tasks)
    pilot_held = pilot.commit.held_seconds
    cached = float(table["cached_tokens"].to_numpy().sum()) / max(1.0, float(prompt.sum()))
    wall = None
    if held is not None:
        wall = Interval(
            low=held.low / parallel, expected=held.expected / parallel, high=held.high / parallel
        ).plus(pilot_held)
        held = held.plus(pilot_held)
    prompt_all, output_all = prompts.plus(float(prompt.sum())), outputs.plus(float(output.sum()))
    return Forecast(
        pilot_rows=len(prompt),
        sent_rows=rest + len(prompt),
        prompt_tokens=prompt_all,
        output_tokens=output_all,
        tokens=tokens,
        startup_seconds=startup,
        tokens_per_second=rate.expected if rate else None,
        held_seconds=held,
        wall_seconds=wall,
        parallel=parallel,
        cost=_cost(plan.spec.cost, prompt_all, output_all, cached, held),
        currency=plan.spec.cost.currency if plan.spec.cost else "",
    )


def money(cost: CostSpec, tokens: Tokens, held_seconds: float) -> float:
    """What tokens and held time cost at these prices."""
    return (
        cost.per_hour * held_seconds / 3600
        + cost.per_million_prompt_tokens * (tokens.prompt - tokens.cached) / 1e6
        + cost.per_million_cached_tokens * tokens.cached / 1e6
        + cost.per_million_output_tokens * tokens.output / 1e6
    )


def _extrapolate(values: Numbers, rest: int, seed: int) -> list[Interval]:
    """For each line of `values`, the sum over `rest` more rows like its columns."""
    lines, rows = values.shape
    if not rows:
        return [Interval(low=0, expected=0, high=0)] * lines
    means = np.empty((lines, _RESAMPLES))
    generator = np.random.default_rng(seed)
    step = max(1, _DRAWN_AT_ONCE // rows)
    for first in range(0, _RESAMPLES, step):
        drawn = generator.integers(0, rows, (min(step, _RESAMPLES - first), rows))
        means[:, first : first + step] = values[:, drawn].mean(axis=2)
    lows, highs = np.quantile(means, [_LOW, _HIGH], axis=1) * rest
    expected = values.mean(axis=1) * rest
    return [
        Interval(low=float(low), expected=float(middle), high=float(high))
        for low, middle, high in zip(lows, expected, highs, strict=True)
    ]


def _speed(commit: Commit, finished: Numbers, tokens: Numbers) -> tuple[float | None, Interval | None]:
    """Seconds to the first row, and tokens a second after it; none if the pilot was too short to tell."""
    if not len(finished):
        return None, None
    started = datetime.fromisoformat(commit.created_at).timestamp() - commit.held_seconds
    startup = max(0.0, float(finished[0]) - started)
    duration = float(finished[-1] - finished[0])
    if duration <= 0 or len(finished) < 2:
        return startup, None
    rate = float(tokens[1:].sum()) / duration
    rates = [
        float(tokens[part].sum()) / seconds
        for part in np.array_split(np.arange(1, len(finished)), min(_SLICES, len(finished) - 1))
        if (seconds := float(finished[part[-1]] - finished[part[0] - 1])) > 0
    ]
    spread = float(np.std(rates)) / math.sqrt(len(rates)) if len(rates) > 1 else rate / 2
    low = max(rate - 1.645 * spread, rate / 3)
    return startup, Interval(low=low, expected=rate, high=rate + 1.645 * spread)


def _held(tokens: Interval, rate: Interval | None, startup: float | None, tasks: int) -> Interval | None:
    if rate is None or startup is None or rate.expected <= 0:
        return None
    return Interval(
        low=tokens.low / rate.high, expected=tokens.expected / rate.expected, high=tokens.high / rate.low
    ).plus(startup * tasks)


def _cost(
    cost: CostSpec | None, prompt: Interval, output: Interval, cached: float, held: Interval | None
) -> Interval | None:
    if cost is None or (cost.per_hour and held is None):
        return None

    def at(bound: str) -> float:
        prompts = round(getattr(prompt, bound))
        paid = Tokens(prompt=prompts, output=round(getattr(output, bound)), cached=round(prompts * cached))
        return money(cost, paid, getattr(held, bound) if held else 0.0)

    values: Sequence[float] = [at(bound) for bound in ("low", "expected", "high")]
    return Interval(low=values[0], expected=values[1], high=values[2])
