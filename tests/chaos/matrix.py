"""The matrix: each case injects one fault in one place, lets the run finish, and asks the oracle."""

from __future__ import annotations

import atexit
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from airflow_batchinfer.errors import BatchInferError, ExitCode
from airflow_batchinfer.run.commit import chosen_commit
from airflow_batchinfer.run.layout import RunLayout, run_dir
from tests.chaos.airflow import airflow_cases
from tests.chaos.case import Case
from tests.chaos.injection import TABLE, WRITES, Fault
from tests.chaos.oracle import Account, durable_rows, tables
from tests.chaos.run import ROWS, ChaosRun, paid_in, suspended, wake
from tests.chaos.s3 import s3_cases


@dataclass(frozen=True)
class Line:
    """What a case came to, summed over its tries. `failed`: why a try did not come to its promised end."""

    case: Case
    lost: int
    doubled: int
    paid_twice: int
    failed: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Nothing lost, doubled or paid twice, and every try came to its end."""
        return not (self.lost or self.doubled or self.paid_twice or self.failed)


def run_case(case: Case) -> Line:
    """Try a case as often as it says, each time in a new folder."""
    lost = doubled = paid_twice = 0
    failed: list[str] = []
    for number, attempt in enumerate(case.tries):
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            found = attempt(folder)
        except Exception as error:  # whatever it is, it fails this try, and no other
            failed.append(f"try {number}: {type(error).__name__}: {error}")
            continue
        lost += found.lost
        doubled += found.doubled
        paid_twice += found.paid_twice
        shutil.rmtree(folder, ignore_errors=True)
    return Line(case, lost, doubled, paid_twice, tuple(failed))


def cases(*, random_kills: int, seed: int = 20261129) -> Iterator[Case]:
    """The whole matrix. `random_kills` sets how many random points are tried."""
    yield from _kill_points()
    yield _random_kills(random_kills, seed)
    yield from _reclaims()
    yield from _two_attempts()
    yield from _storage()
    yield from s3_cases()
    yield from _flips(seed)
    yield from _engines()
    yield from _publishing()
    yield from airflow_cases()


# Kills of the worker


def _kill_points() -> Iterator[Case]:
    points = [("suspects.json", 1), ("progress.json", 2), ("part-00000", 1), ("part-00002", 1)]
    points += [("part-00005", 1), ("commit.json", 1)]
    for key, nth in points:
        for when in ("before", "after"):
            fault = Fault("kill", key=key, nth=nth, when=when)  # type: ignore[arg-type]
            yield Case("SIGKILL of the worker", f"{when} write {nth} of `{key}`", (partial(_kill, fault),))
    yield Case(
        "a torn write, then SIGKILL",
        "half a part, half a commit under its final name",
        tuple(partial(_kill, Fault("torn", key=key)) for key in ("part-00001", "commit.json")),
    )


def _kill(fault: Fault, folder: Path) -> Account:
    run = ChaosRun(folder)
    code = run.attempt(fault)
    assert code == -signal.SIGKILL, f"the fault never struck (exit {code})"
    run.finish()
    return run.account()


def _random_kills(count: int, seed: int) -> Case:
    rng = random.Random(seed)
    operations = ("write_bytes", "put_file", "delete", "read_bytes", "list")
    faults = [
        [
            Fault("kill", operations=operations, nth=rng.randint(1, 24), when=rng.choice(("before", "after")))
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(count)
    ]
    return Case(
        "SIGKILL of the worker",
        "1 to 3 random storage operations in a row (seeded)",
        tuple(partial(_kills, f) for f in faults),
    )


def _kills(faults: list[Fault], folder: Path) -> Account:
    run = ChaosRun(folder)
    for fault in faults:
        run.attempt(fault)
    run.finish()
    return run.account()


# SIGTERM


def _reclaims() -> Iterator[Case]:
    for grace in (0.0, 5.0, 30.0):
        yield Case(
            "SIGTERM to the worker",
            f"after 30 answers, {grace:g} s of grace",
            (partial(_reclaim, grace),),
        )

    yield Case(
        "SIGKILL of the task's own process", "after 30 answers; its worker lives on", (_kill_task, _kill_task)
    )


def _reclaim(grace: float, folder: Path) -> Account:
    checkpoint = {"rows": 1000, "seconds": 60.0, "grace_seconds": grace, "progress_seconds": 0.1}
    run = ChaosRun(folder, checkpoint=checkpoint, engine={"delay_seconds": 0.05})

    def terminate(process: subprocess.Popen[bytes]) -> None:
        run.wait_until(lambda: len(run.paid_rows()) >= 30, process)
        process.terminate()

    code = run.attempt(meanwhile=terminate)
    assert code == ExitCode.RECLAIMED, f"exit {code}"
    # Nothing that was answered before the end may be paid again, grace or not: it was flushed.
    run.finish()
    assert max(run.paid_rows().values()) == 1, "a row that was answered before SIGTERM was paid again"
    return run.account()


def _kill_task(folder: Path) -> Account:
    """The worker is not told: it notices that its parent is gone, and leaves as on SIGTERM."""
    run = ChaosRun(folder, engine={"delay_seconds": 0.05})
    task = run.start(what="task")
    run.wait_until(lambda: len(run.paid_rows()) >= 30, task)
    task.kill()
    run.wait(task)
    run.wait_until(lambda: run.left() == "reclaimed")
    assert run.durable() >= set(run.paid_rows()), "an answer that was paid for is not durable"
    run.finish()
    return run.account()


# Two attempts at once


def _two_attempts() -> Iterator[Case]:
    points = ("part-00001", "part-00004", "commit.json")
    yield Case(
        "two attempts at once",
        "the older sleeps before a part or its commit, and wakes after the newer committed",
        tuple(partial(_zombie, key, 0.0) for key in points),
    )
    yield Case(
        "clock skew",
        "the same, one of the two an hour ahead or behind",
        tuple(partial(_zombie, "commit.json", skew) for skew in (-3600.0, 3600.0)),
    )


def _zombie(key: str, skew: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    older = run.start(Fault("stop", key=key, skew_seconds=skew))
    run.wait_until(lambda: suspended(older), older)
    run.finish()
    first = chosen_commit(run.store, run.layout, 0, run.plan.fingerprint)
    assert first is not None
    before = run.account()
    wake(older)
    run.wait(older)
    after = run.account()
    assert (before.lost, before.doubled) == (0, 0), "wrong before the older attempt woke"
    return after


# Storage


def _storage() -> Iterator[Case]:
    for do, name in (("eio", "I/O error"), ("enospc", "disk full"), ("eacces", "permission lost")):
        yield Case(
            f"{name}, once",
            "at each of the first 12 writes",
            tuple(partial(_storage_error, Fault(do, operations=WRITES, nth=n)) for n in range(1, 13)),  # type: ignore[arg-type]
        )
        yield Case(
            f"{name}, lasting",
            "from the second part on, until the worker gives up",
            (partial(_storage_error, Fault(do, key="part-", nth=2, times=10**6)),),  # type: ignore[arg-type]
        )
    yield Case(
        "slow storage",
        "every write takes half a second more",
        (partial(_storage_error, Fault("slow", times=10**6)),),
    )


def _storage_error(fault: Fault, folder: Path) -> Account:
    run = ChaosRun(folder)
    code = run.attempt(fault)
    assert code in (ExitCode.COMMITTED, ExitCode.STORE_FAILED), f"exit {code}"
    if code != ExitCode.COMMITTED:
        run.finish()
    return run.account()


# Flipped bytes


def _flips(seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for name in ("plan.json", "part-00001.parquet", "commit.json", "rows-"):
        places = [rng.random() for _ in range(10)]
        yield Case(
            "a flipped byte",
            f"in `{name}`, after the commit: a clear error, or the right tables",
            tuple(partial(_flip, name, place) for place in places),
        )
    yield Case(
        "a flipped byte",
        "in a part, before the shard resumes",
        tuple(partial(_flip_and_resume, rng.random()) for _ in range(5)),
    )
    yield Case(
        "a flipped byte",
        "in `ledger.json`, before merge: a clear error and no tables until reconcile runs again",
        tuple(partial(_flip_ledger, rng.random()) for _ in range(5)),
    )


def _flip(name: str, place: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    run.finish()
    _flip_byte(run, name, place)
    try:
        return run.account()
    except BatchInferError:  # one of ours always has a message; any other error fails the try
        return Account(0, 0, run.paid_twice, {})


def _flip_and_resume(place: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    run.attempt(Fault("kill", key="part-00003"))
    _flip_byte(run, "part-00001.parquet", place)
    run.paid_twice = 0  # the damaged part's rows are not durable any more
    run.finish()
    return run.account()


def _flip_ledger(place: float, folder: Path) -> Account:
    run = _committed_run().copied_to(folder)
    assert run.wait(run.start(what="reconcile")) == 0
    _flip_byte(run, "ledger.json", place)
    if run.wait(run.start(what="merge")) == 0:  # not if the flip is one that says the same
        return tables(run.store, run.plan, run.paid_twice)
    assert tables(run.store, run.plan).lost == ROWS, "merge refused the ledger, and published"
    return run.account()


def _flip_byte(run: ChaosRun, name: str, place: float) -> None:
    path = next(p for p in sorted(Path(run.store.uri).rglob("*")) if name in p.name and p.is_file())
    data = bytearray(path.read_bytes())
    position = min(int(place * len(data)), len(data) - 1)
    data[position] ^= 0x55
    path.write_bytes(bytes(data))


# Engines


def _engines() -> Iterator[Case]:
    dying = {"backend": "tests.engines:DyingEngine"}
    yield Case(
        "the engine dies", "whenever it runs one row", (partial(_one_row, "die", "engine_killed", dying),)
    )
    quick = {"retry": {"row_timeout_seconds": 1.0, "stall_seconds": 1.0, "backoff_seconds": 0.01}}
    yield Case("the engine never answers one row", "", (partial(_one_row, "hang", "timed_out", quick),))
    yield Case("the engine stalls as a whole", "on one row", (partial(_one_row, "stall", None, quick),))
    yield Case("the engine answers a row twice", "", (partial(_one_row, "twice", "", quick),))
    yield Case(
        "the engine answers nothing",
        "spaces, an empty text, none",
        tuple(partial(_one_row, marker, "empty_output", quick) for marker in ("blank", "empty", "none")),
    )
    yield Case("the engine answers invalid UTF-8", "", (partial(_one_row, "utf8", "", quick),))
    yield Case(
        "the engine takes the worker with it",
        "SIGKILL of the whole process whenever it runs one row",
        (partial(_one_row, "killworker", "engine_killed", quick),),
    )


def _one_row(marker: str, reason: str | None, options: dict[str, object], folder: Path) -> Account:
    """One bad row among good ones. `reason`: its dead letter's; empty: it succeeds; none: any."""
    texts = [f"row number {i}" for i in range(ROWS)]
    texts[ROWS // 2] += f" <<{marker}>>"
    run = ChaosRun(folder, texts, **dict(options))
    run.finish()
    found = run.account()
    if reason is not None:
        assert found.dead == ({reason: 1} if reason else {}), f"dead letters: {found.dead}"
    assert sum(found.dead.values()) <= 1, f"the bad row harmed others: {found.dead}"
    return found


# Reconcile and merge


def _publishing() -> Iterator[Case]:
    yield Case(
        "SIGKILL of reconcile and merge",
        "before and after each storage operation, then run again",
        tuple(
            partial(_kill_publishing, what, nth, when)
            for what in ("reconcile", "merge")
            for nth in (1, 2, 3, 4, 6, 8)
            for when in ("before", "after")
        ),
    )
    for what, writes in (("reconcile", _LEDGER_WRITES), ("merge", _MERGE_WRITES)):
        yield Case(
            f"SIGKILL of {what}",
            "before and after every write, those to the tables included, then run again",
            tuple(
                partial(_kill_at_write, what, nth, when)
                for nth in range(1, writes + 1)
                for when in ("before", "after")
            ),
        )
        yield Case(f"{what} has no more writes than those", "", (partial(_no_more_writes, what, writes),))
        yield Case(
            f"disk full in {what}",
            "at every write, those to the tables included, then run again",
            tuple(partial(_fail_at_write, what, nth) for nth in range(1, writes + 1)),
        )
    yield Case(
        "SIGKILL of a replay",
        f"before each of its first {_REPLAY_WRITES} writes (plan, worker, ledger, tables), then run again",
        tuple(partial(_kill_replay, nth) for nth in range(1, _REPLAY_WRITES + 1)),
    )
    yield Case("two merges at once", "started together, twice", (_two_merges, _two_merges))


_ANY = ("write_bytes", "put_file", "delete", "read_bytes", "list")


def _kill_publishing(what: str, nth: int, when: str, folder: Path) -> Account:
    run = ChaosRun(folder)
    run.finish()
    if what == "merge":
        run.wait(run.start(what="reconcile"))
    run.wait(run.start(Fault("kill", operations=_ANY, nth=nth, when=when), what))  # type: ignore[arg-type]
    return run.account()


_LEDGER_WRITES = 1
_MERGE_WRITES = 6
"""Two tables made and written, the note of what was merged, the job's note of published runs."""
_REPLAY_WRITES = 24


@cache
def _committed_run() -> ChaosRun:
    """A run with a dead row, committed; shared by cases that copy it."""
    texts = [f"row number {i}" for i in range(ROWS)]
    for row in (7, 70):
        texts[row] += " <<refuse>>"
    run = ChaosRun(Path(tempfile.mkdtemp(prefix="chaos-")), texts)
    atexit.register(shutil.rmtree, run.folder, ignore_errors=True)
    run.finish()
    return run


@cache
def _published_run() -> ChaosRun:
    run = _committed_run().copied_to(Path(tempfile.mkdtemp(prefix="chaos-")))
    atexit.register(shutil.rmtree, run.folder, ignore_errors=True)
    assert run.account().dead == {"engine_refused": 2}
    return run


def _kill_at_write(what: str, nth: int, when: str, folder: Path) -> Account:
    run = _committed_run().copied_to(folder)
    if what == "merge":
        assert run.wait(run.start(what="reconcile")) == 0
    fault = Fault("kill", operations=(*WRITES, TABLE), nth=nth, when=when)  # type: ignore[arg-type]
    assert run.wait(run.start(fault, what)) == -signal.SIGKILL, "the fault never struck"
    return run.account()


def _fail_at_write(what: str, nth: int, folder: Path) -> Account:
    run = _committed_run().copied_to(folder)
    if what == "merge":
        assert run.wait(run.start(what="reconcile")) == 0
    assert run.wait(run.start(Fault("enospc", operations=(*WRITES, TABLE), nth=nth), what)) == 1
    return run.account()


def _no_more_writes(what: str, writes: int, folder: Path) -> Account:
    run = _committed_run().copied_to(folder)
    if what == "merge":
        assert run.wait(run.start(what="reconcile")) == 0
    fault = Fault("kill", operations=(*WRITES, TABLE), nth=writes + 1)
    assert run.wait(run.start(fault, what)) == 0, "there is a write that no case strikes"
    return run.account()


def _kill_replay(nth: int, folder: Path) -> Account:
    run = _published_run().copied_to(folder)
    replay, log = RunLayout(run_dir(run.plan.job, "replay")), folder / "replay.tsv"
    run.wait(run.start(Fault("kill", operations=(*WRITES, TABLE), nth=nth), "replay"))
    durable, before = durable_rows(run.store, replay, 0), paid_in(log)
    assert run.wait(run.start(what="replay")) == 0, f"the replay cannot go on; log: {folder / 'log.txt'}"
    found = tables(run.store, run.plan, sum((paid_in(log) - before)[row] for row in durable))
    assert found.dead == {}, f"rows that the replay left dead: {found.dead}"
    return found


def _two_merges(folder: Path) -> Account:
    run = ChaosRun(folder)
    run.finish()
    run.wait(run.start(what="reconcile"))
    both = [run.start(what="merge") for _ in range(2)]
    codes = [run.wait(p) for p in both]
    assert 0 in codes, f"neither merge succeeded: {codes}"
    return tables(run.store, run.plan, run.paid_twice)
