"""Any sequence of faults over a run and its replays: in the end, the account of a plain dictionary.

The steps and the worker are the real ones; only the engine is made up. Whatever was done to them, at the
end each row stands once in the results with its right answer, or once among the dead letters with its
reason, and no attempt has paid for a row that was durable before it began.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import BatchInferError, ExitCode
from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.pipeline.dead_letters import Status
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import LocalStore
from tests.engines import answer_to
from tests.unit.fuzz.damage import fuzzed
from tests.unit.pipeline.in_process import Attempt, Killed, Strike, StrikingStore, workers_in_threads
from tests.unit.pipeline.runs import job, table_rows, write_input

pytestmark = pytest.mark.airflow_env

BACKEND = "tests.unit.pipeline.in_process:Noting{}Engine"

REASON_OF: dict[str | None, Reason | None] = {
    None: Reason.EMPTY_INPUT,
    "": Reason.EMPTY_INPUT,
    " \t": Reason.EMPTY_INPUT,
    "plain": None,
    'é 😀\u2028, "quoted"': None,
    "<<twice>>": None,
    "late <<transient 1>>": None,
    "never <<transient 9>>": Reason.ENGINE_ERROR,
    "<<refuse>>": Reason.ENGINE_REFUSED,
    "<<overlong>>" + "x" * 2000: Reason.OVER_LONG,
    "<<blank>>": Reason.EMPTY_OUTPUT,
}
"""What becomes of each text in the run itself; in a replay, the engine answers whatever is not empty."""

TEXT = st.one_of(st.sampled_from(list(REASON_OF)), st.integers(0, 99).map(lambda i: f"text {i}"))


# Steps


@dataclass(frozen=True)
class Work:
    """A worker takes a shard."""

    shard: int
    strike: Strike | None


@dataclass(frozen=True)
class Wake:
    """The worker that has been held for longest goes on, whatever others did meanwhile."""


@dataclass(frozen=True)
class Damage:
    """One file of the run is no longer what it was; `at` is the place in it, of `_PLACES`."""

    file: int
    how: Literal["flip", "cut", "lose"]
    at: int


@dataclass(frozen=True)
class PutBack:
    """Files that nothing can make anew come back from their copies."""


@dataclass(frozen=True)
class Step:
    """A step of the pipeline, for the run or for one of its replays."""

    name: Literal["split", "reconcile", "merge", "replay"]
    run: int
    strike: Strike | None


_PLACES = 10**5

SHORT = st.integers(1, 25)
STRIKE = st.builds(
    Strike, st.sampled_from(["kill", "error"]), SHORT, after=st.booleans(), times=st.integers(1, 8)
)
HOLD = st.builds(Strike, st.just("hold"), SHORT, after=st.booleans())
STEP = st.one_of(
    st.builds(Work, st.integers(0, 9), st.one_of(st.none(), STRIKE, STRIKE)),
    st.builds(Work, st.integers(0, 9), HOLD),
    st.builds(Damage, st.integers(0, 99), st.sampled_from(["flip", "cut", "lose"]), st.integers(0, _PLACES)),
    st.builds(
        Step,
        st.sampled_from(["split", "reconcile", "merge", "merge", "replay"]),
        st.integers(0, 2),
        st.one_of(st.none(), st.none(), STRIKE),
    ),
    st.just(Wake()),
    st.just(PutBack()),
)

# The model

Expected = tuple[Reason | None, str | None]


@dataclass
class Run:
    """A run or a replay, and what has to become of its rows."""

    plan: Plan
    rows: dict[int, Expected]
    """By row id: why it dies, or its answer."""
    committed: set[int] = field(default_factory=set)
    """Shards whose commit stands unharmed."""
    reconciled: bool = False
    """Whether nothing has happened to the run since its ledger was written."""
    published: bool = False
    """Whether the tables have it from this ledger."""
    merged: bool = False
    tried: bool = False
    """Whether a merge was begun: what it has published may be there."""

    @property
    def complete(self) -> bool:
        return self.committed == {s.shard for s in self.plan.shards}

    def changed(self) -> None:
        """Something has happened to it, or may have."""
        self.reconciled = self.published = False

    @property
    def good(self) -> dict[int, str]:
        return {row: answer for row, (reason, answer) in self.rows.items() if reason is None and answer}


class World:
    """A store, what is done to it, and what must be true of it."""

    def __init__(self, folder: Path, texts: Sequence[str | None], **fields: Any) -> None:
        rows = [{"text": text, "carried": f"row {i}"} for i, text in enumerate(texts)]
        types = pa.schema([("text", pa.string()), ("carried", pa.string())])
        write_input(folder, pa.Table.from_pylist(rows, schema=types))
        self.spec = job(
            folder,
            input={"path": str(folder / "in"), "carry": ["carried"]},
            prompt={"template": "Say: {{ text }}"},
            model={"name": "none", "backend": BACKEND.format("Faulty"), "engine": {"max_in_flight": 3}},
            failure={"max_dead_fraction": 1.0},
            retry={"backoff_seconds": 0.0},
            **fields,
        )
        self.texts = texts
        self.store = LocalStore(self.spec.store)
        plan = split(self.store, self.spec, "run")
        self.runs = [Run(plan, {i: self._expected(i) for i in range(len(texts))})]
        self.held: list[tuple[Run, int, Attempt, dict[str, set[int]]]] = []
        self.lost: dict[Path, bytes] = {}
        """What damaged files that nothing can make anew held before."""
        self.spoilt: set[str] = set()
        """Keys of damaged parts: what they held may be paid for again."""

    @property
    def home(self) -> Run:
        return self.runs[0]

    def _expected(self, row: int, *, replayed: bool = False) -> Expected:
        text = self.texts[row]
        reason = REASON_OF.get(text)
        if reason is None or (replayed and reason is not Reason.EMPTY_INPUT):
            return None, answer_to(self.spec, f"Say: {text}")
        return reason, None

    def do(self, step: Work | Wake | Damage | PutBack | Step) -> None:
        match step:
            case Work():
                shards = [(run, s.shard) for run in self.runs for s in run.plan.shards]
                self.work(*shards[step.shard % len(shards)], step.strike)
            case Wake():
                self.wake()
            case Damage():
                self.damage(step)
            case PutBack():
                self.put_back()
            case Step():
                run = self.runs[step.run % len(self.runs)]
                {
                    "split": self.split,
                    "reconcile": self.reconcile,
                    "merge": self.merge,
                    "replay": self.replay,
                }[step.name](run, step.strike)

    # Workers

    def work(self, run: Run, shard: int, strike: Strike | None = None) -> None:
        durable = self._durable(run, shard)
        attempt = Attempt(self.store.uri, run.plan.folder, shard, strike)
        attempt.start()
        if attempt.wait():
            self._ended(run, shard, attempt, durable)
            assert strike or self.lost or attempt.ended is ExitCode.COMMITTED, attempt.ended
        else:
            self.held.append((run, shard, attempt, durable))

    def wake(self) -> None:
        if self.held:
            run, shard, attempt, durable = self.held.pop(0)
            attempt.wake()
            self._ended(run, shard, attempt, durable)

    def _ended(self, run: Run, shard: int, attempt: Attempt, durable: dict[str, set[int]]) -> None:
        if isinstance(attempt.ended, BaseException) and not isinstance(
            attempt.ended, (BatchInferError, Killed)
        ):
            raise attempt.ended
        kept = {row for key, rows in durable.items() if key not in self.spoilt for row in rows}
        assert not kept & attempt.paid.keys(), "paid for again"
        run.changed()
        if attempt.ended is ExitCode.COMMITTED:
            run.committed.add(shard)

    def _durable(self, run: Run, shard: int) -> dict[str, set[int]]:
        """Rows by the sound part that holds them."""
        keys = [i.key for i in self.store.list(RunLayout(run.plan.folder).shard(shard)) if "/part-" in i.key]
        return {
            key: set(pq.read_table(io.BytesIO(self.store.read_bytes(key)))["row_id"].to_pylist())
            for key in keys
            if key not in self.spoilt
        }

    # Damage

    def damage(self, step: Damage) -> None:
        files = [info.key for info in self.store.list("job/runs")]
        key = files[step.file % len(files)]
        path = Path(self.store.uri_of(key))
        data = path.read_bytes()
        at = len(data) * step.at // (_PLACES + 1)  # sizes differ a little with the times that are in them
        if step.how == "flip" and data:
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << step.at % 8)]) + data[at + 1 :])
        elif step.how == "cut" or path.name == "plan.json":  # without a plan, it would be another run
            path.write_bytes(data[:at])
        else:
            path.unlink()
        if path.name == "plan.json" or path.name.startswith(("rows-", "copies-")) or "/replays/" in key:
            self.lost.setdefault(path, data)
        elif path.name.startswith("part-"):
            self.spoilt.add(key)
        for run in self.runs:
            if key.startswith(f"{run.plan.folder}/"):
                run.changed()
                if path.name.startswith(("part-", "commit")):
                    run.committed.clear()

    def put_back(self) -> None:
        for path, data in self.lost.items():
            path.write_bytes(data)
        self.lost.clear()

    # Steps

    @contextmanager
    def _may_fail(self, strike: Strike | None, *, must: bool) -> Iterator[StrikingStore]:
        """A store for one step. It may fail if it was struck, or if it need not work."""
        try:
            yield StrikingStore(self.store.uri, strike)
        except (BatchInferError, Killed):
            if strike is None and must and not self.lost:
                raise

    def split(self, run: Run, strike: Strike | None = None) -> None:
        with self._may_fail(strike, must=True) as store:
            assert split(store, self.spec, "run") == self.home.plan

    def reconcile(self, run: Run, strike: Strike | None = None) -> None:
        run.changed()
        with self._may_fail(strike, must=run.complete) as store:
            ledger = reconcile(store, run.plan.folder)
            counts = Counter(outcome_of(reason).value for reason, _ in run.rows.values())
            assert {k: n for k, n in ledger.counts.items() if n} == counts
            assert ledger.rows == len(run.rows)
            reasons = Counter(reason.value for reason, _ in run.rows.values() if reason)
            assert ledger.reasons == reasons
            run.reconciled = True

    def merge(self, run: Run, strike: Strike | None = None) -> None:
        run.tried = True
        proven = all(r.complete and r.reconciled for r in self.runs if r.tried)
        with self._may_fail(strike, must=proven and (run is self.home or self.home.published)) as store:
            merge(store, run.plan.folder)
            run.merged = run.published = True
            self.check_tables()

    def replay(self, run: Run, strike: Strike | None = None) -> None:
        if len(self.runs) > 2:
            return
        number = len(self.runs)
        with self._may_fail(strike, must=self.home.complete and self.home.reconciled) as store:
            model = {"backend": BACKEND.format("Instant")}
            plan = prepare_replay(
                store, self.home.plan.folder, f"replay {number}", overrides={"model": model}
            )
            left = self.home.rows.keys() - self.home.good.keys() - {r["row_id"] for r in self._results()}
            assert plan.rows == len(left)
            if left:
                self.runs.append(Run(plan, {row: self._expected(row, replayed=True) for row in left}))

    # What must be true

    def _results(self) -> list[dict[str, Any]]:
        exists = any(True for _ in self.store.list("job/results"))
        return table_rows(self.store, "job/results") if exists else []

    def check_tables(self) -> None:
        """After a merge: all rows once, the right answers to the right rows; as far as replays have come."""
        results = self._results()
        answers = {row["row_id"]: row["output"] for row in results}
        assert len(answers) == len(results), "a row stands twice"
        replays = self.runs[1:]
        must = self.home.good | {k: v for r in replays if r.merged for k, v in r.good.items()}
        may = must | {k: v for r in replays if r.tried for k, v in r.good.items()}
        assert must.items() <= answers.items() <= may.items()
        assert all(row["carried"] == f"row {row['row_id']}" for row in results)
        letters = {row["row_id"]: row for row in table_rows(self.store, "dead_letters")}
        dead = {row: reason for row, (reason, _) in self.home.rows.items() if reason}
        assert letters.keys() == dead.keys()
        for row, letter in letters.items():
            assert letter["reason"] == dead[row]
            assert (letter["status"] == Status.RESOLVED) == (row in answers)
        assert standing_of(self.store, self.home.plan).rows == len(self.texts)

    def finish(self) -> None:
        """Clear all there is, once: then the run and its replays are whole."""
        self.put_back()
        while self.held:
            self.wake()
        for run in self.runs:
            for shard in run.plan.shards:
                self.work(run, shard.shard)
            self.reconcile(run)
        for run in self.runs:
            self.merge(run)
        assert all(run.published for run in self.runs)
        assert merge(self.store, self.home.plan.folder) == merge(self.store, self.home.plan.folder)
        self.check_tables()


@fuzzed(40)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=14),
    max_rows=st.integers(1, 8),
    dedup=st.booleans(),
    part_rows=st.integers(1, 5),
    steps=st.lists(STEP, max_size=14),
)
def test_any_sequence_of_faults_ends_in_the_right_account(
    texts: list[str | None], max_rows: int, dedup: bool, part_rows: int, steps: list[Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder, workers_in_threads():
        world = World(
            Path(folder),
            texts,
            sharding={"max_rows": max_rows, "dedup": dedup},
            checkpoint={"rows": part_rows, "seconds": 3600.0, "progress_seconds": 3600.0},
        )
        try:
            for step in steps:
                world.do(step)
            world.finish()
        finally:
            for *_, attempt, _ in world.held:
                attempt.wake()
