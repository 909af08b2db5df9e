"""The matrix: each case injects one fault in one place, lets the run finish, and asks the oracle."""

from __future__ import annotations

import atexit
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from airflow_batchinfer.errors import BatchInferError, ExitCode
from airflow_batchinfer.run.layout import run_dir
from tests.chaos.airflow import airflow_cases
from tests.chaos.case import Case
from tests.chaos.injection import OPERATIONS, TABLE, WRITES, Fault
from tests.chaos.oracle import Account
from tests.chaos.run import PART_ROWS, ROWS, STRIKES, WINDOW, ChaosRun, suspended, wake
from tests.chaos.s3 import s3_cases

SEED = 20261129

_WHEN: tuple[Literal["before", "after"], ...] = ("before", "after")


@dataclass(frozen=True)
class Line:
    """What a case came to, summed over its tries.

    `strikes`: what the faults did, a line each. `failed`: why a try did not come to its promised end.
    """

    case: Case
    lost: int
    doubled: int
    wrong: int
    paid_twice: int
    paid_beside: int
    strikes: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Nothing lost, doubled, wrong or paid twice, and every try came to its end."""
        return not (self.lost or self.doubled or self.wrong or self.paid_twice or self.failed)


def run_case(case: Case) -> Line:
    """Try a case as often as it says, each time in a new folder, which stays where a try fails."""
    found: list[Account] = []
    strikes: list[str] = []
    failed: list[str] = []
    for number, attempt in enumerate(case.tries):
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            account = attempt(folder)
        except Exception as error:  # whatever it is, it fails this try, and no other
            failed.append(f"try {number}: {type(error).__name__}: {error}")
            continue
        found.append(account)
        struck = [line for file in folder.rglob(STRIKES) for line in file.read_text().splitlines()]
        strikes += struck
        bad = _broken(case, account, struck)
        failed += [f"try {number}, {folder}: {what}" for what in bad]
        if not bad:
            shutil.rmtree(folder, ignore_errors=True)
    return Line(
        case,
        sum(account.lost for account in found),
        sum(account.doubled for account in found),
        sum(account.wrong for account in found),
        sum(account.paid_twice for account in found),
        sum(account.paid_beside for account in found),
        tuple(strikes),
        tuple(failed),
    )


def _broken(case: Case, account: Account, struck: list[str]) -> list[str]:
    """What a try that came to its end promised and did not keep, but for the sums in its account."""
    broken = []
    if case.strikes and not struck:
        broken.append("no fault struck")
    if account.dead != case.dead:
        broken.append(f"dead letters {account.dead}, not {dict(case.dead)}")
    if account.paid_beside > case.most_beside:
        broken.append(f"{account.paid_beside} rows paid beside another attempt, not {case.most_beside}")
    return broken


def cases(*, random_kills: int, seed: int = SEED) -> Iterator[Case]:
    """The whole matrix. `random_kills`: how many kills at random points there are."""
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

_LAST_PART = ROWS // PART_ROWS - 1
_WORKER_WRITES = (*(f"part-{n:05d}" for n in range(_LAST_PART + 1)), "commit.json")
"""What an attempt at a whole shard writes of results; a proof that there is no more is a case of its own."""
_WORKER_NOTES = (("suspects.json", 1), ("progress.json", 2))
"""What it writes besides, as often as time allows."""


def _kill_points() -> Iterator[Case]:
    points = [*_WORKER_NOTES, *((key, 1) for key in _WORKER_WRITES)]
    for key, nth in points:
        for when in _WHEN:
            fault = Fault("kill", key=key, nth=nth, when=when)
            yield Case("SIGKILL of the worker", f"{when} write {nth} of `{key}`", (partial(_kill, fault),))
    yield Case(
        "the worker has no more writes of results than those", "", (_no_more_worker_writes,), strikes=False
    )
    yield Case(
        "a torn write, then SIGKILL",
        "half a part, half a commit under its final name",
        tuple(partial(_kill, Fault("torn", key=key)) for key in ("part-00001", "commit.json")),
    )


def _kill(fault: Fault, folder: Path) -> Account:
    run = ChaosRun(folder)
    _killed(run, fault)
    run.finish()
    return run.account()


def _killed(run: ChaosRun, fault: Fault, what: str = "worker") -> None:
    code = run.attempt(fault, what)
    assert code == -signal.SIGKILL, f"not killed (exit {code})"


def _no_more_worker_writes(folder: Path) -> Account:
    run = ChaosRun(folder)
    notes = "|".join(key for key, _ in _WORKER_NOTES)
    _no_more(run, "worker", len(_WORKER_WRITES), key=f"^(?!.*({notes}))")
    return run.account()


def _no_more(
    run: ChaosRun, what: str, count: int, key: str = "", operations: tuple[str, ...] = WRITES
) -> None:
    """Prove that a victim does `count` operations: it can be struck at the last of them, and never after."""
    for nth in (count, count + 1):
        twin = run.copied_to(run.folder / str(nth))
        code = twin.wait(twin.start(Fault("kill", operations, key, nth), what))
        wanted = -signal.SIGKILL if nth == count else 0
        assert code == wanted, f"{what} does not make exactly {count} operations (exit {code} at {nth})"
    assert run.attempt(what=what) == 0


def _random_kills(count: int, seed: int) -> Case:
    rng = random.Random(seed)
    tries = []
    while count > 0:
        kills = min(count, rng.randint(1, 3))
        count -= kills
        tries.append(partial(_kills, kills, rng.getrandbits(32)))
    return Case(
        "SIGKILL of the worker",
        "at random storage operations, 1 to 3 kills in a row (what is not reached is drawn again)",
        tuple(tries),
    )


_MOST_DRAWS = 60
"""A committed shard's worker does few operations: not every point is reached."""


def _kills(kills: int, seed: int, folder: Path) -> Account:
    rng = random.Random(seed)
    run = ChaosRun(folder)
    for draw in range(_MOST_DRAWS):
        fault = Fault("kill", OPERATIONS, nth=rng.randint(1, 24), when=rng.choice(_WHEN))
        twin = run.copied_to(folder / str(draw))
        if twin.wait(twin.start(fault)) == -signal.SIGKILL:
            run, kills = twin, kills - 1
            if not kills:
                break
    assert not kills, f"{kills} kills are left after {_MOST_DRAWS} draws"
    run.finish()
    return run.account()


# SIGTERM

_HUNG, _SOON, _LATE = range(3)
"""The first rows of a shard that is reclaimed: never answered, answered after 3 seconds, after 10."""


def _reclaims() -> Iterator[Case]:
    for grace, then in ((0, "none of these"), (5, "the first of the slow ones"), (30, "both slow ones")):
        yield Case(
            "SIGTERM to the worker",
            f"after 30 answers, {grace} s of grace; in flight are a row that hangs and rows of 3 s and 10 s: "
            f"{then} and all that was sent else is kept",
            (partial(_reclaim, grace),),
        )

    yield Case(
        "SIGKILL of the task's own process", "after 30 answers; its worker lives on", (_kill_task, _kill_task)
    )


def _reclaim(grace: int, folder: Path) -> Account:
    checkpoint = {"rows": 1000, "seconds": 600.0, "grace_seconds": grace, "progress_seconds": 0.1}
    texts = [f"row number {i}" for i in range(ROWS)]
    for row, marker in ((_HUNG, "hang 1"), (_SOON, "slow 3"), (_LATE, "slow 10")):
        texts[row] += f" <<{marker}>>"
    engine = {"delay_seconds": 0.05, "starts_log": str(folder / "starts")}
    run = ChaosRun(folder, texts, checkpoint=checkpoint, engine=engine)
    worker = run.start()
    run.wait_until(lambda: len(run.paid_rows()) >= 30, worker)
    run.strike("SIGTERM")
    worker.terminate()
    code = run.wait(worker, grace + 30)  # much later, it would not be grace but a worker that hangs
    assert code == ExitCode.RECLAIMED, f"exit {code}"
    durable = run.durable()
    assert durable == set(run.paid_rows()), "an answer that was paid for is not durable"
    kept = {row for row, needs in ((_HUNG, 600), (_SOON, 3), (_LATE, 10)) if grace > needs}
    assert durable & {_HUNG, _SOON, _LATE} == kept, f"of the slow rows, {durable & {0, 1, 2}} are durable"
    if grace:  # rows go in their order: whatever was sent is answered, and whatever was answered is kept
        sent = set(range(max(durable) + 1))
        assert sent - durable == {_HUNG, _SOON, _LATE} - kept, f"not durable: {sorted(sent - durable)}"
    # Nothing that was answered before the end may be paid again, grace or not: it was flushed.
    run.finish()
    assert max(run.paid_rows().values()) == 1, "a row that was answered before SIGTERM was paid again"
    return run.account()


def _kill_task(folder: Path) -> Account:
    """The worker is not told: it notices that its parent is gone, and leaves as on SIGTERM."""
    run = ChaosRun(folder, engine={"delay_seconds": 0.05})
    task = run.start(what="task")
    run.wait_until(lambda: len(run.paid_rows()) >= 30, task)
    run.strike("SIGKILL of the task")
    task.kill()
    assert run.wait(task) == -signal.SIGKILL
    run.wait_until(lambda: run.left() == "reclaimed")
    assert run.durable() >= set(run.paid_rows()), "an answer that was paid for is not durable"
    run.finish()
    return run.account()


# Two attempts at once

_HOUR = 3600.0


def _two_attempts() -> Iterator[Case]:
    yield Case(
        "two attempts at once",
        "the older sleeps before a part or its commit, and wakes after the newer committed",
        tuple(partial(_zombie, key, 0.0) for key in ("part-00001", "part-00004", "commit.json")),
        most_beside=WINDOW,
    )
    skews = (-_HOUR, _HOUR)
    yield Case(
        "clock skew",
        "the same, the older an hour ahead or behind",
        tuple(partial(_zombie, key, skew) for key in ("part-00001", "commit.json") for skew in skews),
        most_beside=WINDOW,
    )
    yield Case(
        "clock skew",
        "SIGKILL of a worker an hour ahead or behind of the next, and the next of it",
        tuple(
            partial(_skewed_kill, *order)
            for order in ((-_HOUR, 0.0), (_HOUR, 0.0), (0.0, -_HOUR), (0.0, _HOUR))
        ),
    )
    yield Case(
        "clock skew",
        "a row that takes the worker with it; every worker an hour ahead, or behind, of the one before",
        tuple(partial(_skewed_poison, skew) for skew in skews),
        dead={_BAD_ROW: "engine_killed"},
    )


def _zombie(key: str, skew: float, folder: Path) -> Account:
    run = ChaosRun(folder, engine={"delay_seconds": 0.25})
    older = run.start(Fault("stop", key=key, skew_seconds=skew))
    run.wait_until(lambda: suspended(older), older)
    run.finish()
    before = run.account()
    assert suspended(older), "the older attempt did not sleep through the newer one"
    wake(older)
    code = run.wait(older)
    assert code == ExitCode.COMMITTED, f"the older attempt: exit {code}"
    assert (before.lost, before.doubled, before.wrong) == (0, 0, 0), "wrong before the older attempt woke"
    return run.account()


def _skewed_kill(first: float, then: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    _killed(run, Fault("kill", key="part-00003", skew_seconds=first))
    run.finish(fault=Fault(skew_seconds=then))
    return run.account()


def _skewed_poison(skew: float, folder: Path) -> Account:
    run = _with_bad_row("killworker", _QUICK, folder)
    for attempt in range(20):
        code = run.attempt(Fault(skew_seconds=skew * attempt))
        if code == ExitCode.COMMITTED:
            return run.account()
        assert code == -signal.SIGKILL, f"exit {code}"
    raise AssertionError("the row was never found")


# Storage


def _storage() -> Iterator[Case]:
    errors: tuple[tuple[Literal["eio", "enospc", "eacces"], str, str], ...] = (
        ("eio", "I/O error", "fsync fails with EIO"),
        ("enospc", "disk full", "writes go to /dev/full"),
        ("eacces", "permission lost", "open fails with EACCES"),
    )
    for do, name, how in errors:
        once = [*_WORKER_NOTES, *((key, 1) for key in _WORKER_WRITES)]
        yield Case(
            f"{name}, once",
            f"at each write, {how}",
            tuple(partial(_fail, Fault(do, ("write_bytes",), key, nth)) for key, nth in once),
        )
        yield Case(
            f"{name}, lasting",
            f"from the second part on, until the worker gives up; {how}",
            (partial(_fail, Fault(do, key="part-", nth=2, times=10**6), ends=ExitCode.STORE_FAILED),),
        )
    reads = (
        ("read_bytes", "plan.json"),
        ("list", ""),
        ("read_bytes", "part-00000"),
        ("read_bytes", "part-00002"),
    )
    yield Case(
        "permission lost, once",
        "when a shard resumes: at its plan, each list, its first part, its last; open fails with EACCES",
        tuple(partial(_fail_to_resume, Fault("eacces", (name,), key)) for name, key in reads)
        + tuple(partial(_fail_to_resume, Fault("eacces", ("list",), nth=nth)) for nth in (2, 3)),
    )
    yield Case(
        "slow storage",
        "every write takes half a second more",
        (partial(_fail, Fault("slow", times=10**6)),),
    )


def _fail(fault: Fault, folder: Path, *, ends: ExitCode = ExitCode.COMMITTED) -> Account:
    """A write that fails once is tried again; one that goes on failing ends the worker."""
    run = ChaosRun(folder)
    code = run.attempt(fault)
    assert code == ends, f"exit {code}"
    if code != ExitCode.COMMITTED:
        run.finish()
    return run.account()


def _fail_to_resume(fault: Fault, folder: Path) -> Account:
    """What cannot be read now may be there: nothing is paid before that is known."""
    run = ChaosRun(folder)
    _killed(run, Fault("kill", key="part-00003"))
    paid = run.paid_rows()
    code = run.attempt(fault)
    assert code == ExitCode.STORE_FAILED, f"exit {code}"
    assert run.paid_rows() == paid, "it paid for rows before it knew which are durable"
    run.finish()
    return run.account()


# Flipped bytes


def _flips(seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for name in ("plan.json", "part-00001.parquet", "commit.json", "rows-"):
        places = [rng.random() for _ in range(10)]
        yield Case(
            "a flipped byte",
            f"in `{name}`, after the commit: an error that names it and no tables until it is mended, "
            "or the right tables",
            tuple(partial(_flip, name, place) for place in places),
        )
    yield Case(
        "a flipped byte",
        "in a part, before the shard resumes",
        tuple(partial(_flip_and_resume, rng.random()) for _ in range(5)),
    )
    yield Case(
        "a flipped byte",
        "in `ledger.json`, before merge: an error that names it and no tables until reconcile runs again",
        tuple(partial(_flip_ledger, rng.random()) for _ in range(5)),
        dead=_REFUSED,
    )


def _flip(name: str, place: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    run.finish()
    path, data = _flip_byte(run, name, place)
    refusal = ""
    try:
        run.publish()
    except BatchInferError as error:  # any other error fails the try
        refusal = str(error)
    if refusal:
        assert path.name in refusal, f"the error does not name {path.name}: {refusal}"
        assert run.published().results == run.published().dead == {}, "an error, and rows were published"
        if name in ("plan.json", "rows-"):  # a person puts it back; the rest mends itself
            path.write_bytes(data)
            run.damaged.clear()
        run.finish()
        run.publish()
    return run.verdict()


def _flip_and_resume(place: float, folder: Path) -> Account:
    run = ChaosRun(folder)
    _killed(run, Fault("kill", key="part-00003"))
    paid = run.paid_rows()
    path, _ = _flip_byte(run, "part-00001.parquet", place)
    run.finish()
    again = run.paid_rows() - paid
    if set(again) & set(range(PART_ROWS, 2 * PART_ROWS)):
        assert f"{path} is set aside" in run.log(), "rows of the damaged part run again, and nobody says why"
    return run.account()


def _flip_ledger(place: float, folder: Path) -> Account:
    run = _committed_run().copied_to(folder)
    assert run.attempt(what="reconcile") == 0
    path, _ = _flip_byte(run, "ledger.json", place)
    assert run.attempt(what="merge") != 0, "merge took a damaged ledger"
    assert str(path) in run.log(), "the error does not name the ledger"
    assert run.published().results == run.published().dead == {}, "merge refused the ledger, and published"
    return run.account()


def _flip_byte(run: ChaosRun, name: str, place: float) -> tuple[Path, bytes]:
    """Damage a file; returns it, and what was in it."""
    path = next(p for p in sorted(Path(run.store.uri).rglob("*")) if name in p.name and p.is_file())
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[min(int(place * len(data)), len(data) - 1)] ^= 0x55
    path.write_bytes(bytes(damaged))
    run.strike(f"flip in {path.name}")
    run.damaged.append(path.relative_to(run.store.uri).as_posix())
    return path, data


# Engines

_BAD_ROW = ROWS // 2
_QUICK = {"retry": {"row_timeout_seconds": 1.0, "stall_seconds": 1.0, "backoff_seconds": 0.01}}


def _engines() -> Iterator[Case]:
    def case(fault: str, where: str, *markers: str, reason: str = "", **options: object) -> Case:
        return Case(
            fault,
            where,
            tuple(partial(_one_row, marker, _QUICK | options) for marker in markers),
            dead={_BAD_ROW: reason} if reason else {},
        )

    dying = "tests.engines:DyingEngine"
    yield case("the engine dies", "whenever it runs one row", "die", reason="engine_killed", backend=dying)
    yield case("the engine never answers one row", "", "hang", reason="timed_out")
    yield case("the engine stalls as a whole", "on one row", "stall", reason="timed_out")
    yield case("the engine answers a row twice", "", "twice")
    blanks = ("blank", "empty", "none")
    yield case("the engine answers nothing", "spaces, an empty text, none", *blanks, reason="empty_output")
    yield case("the engine answers invalid UTF-8", "", "utf8")
    yield case(
        "the engine takes the worker with it",
        "SIGKILL of the whole process whenever it runs one row",
        "killworker",
        reason="engine_killed",
    )


def _with_bad_row(marker: str, options: Mapping[str, object], folder: Path) -> ChaosRun:
    texts = [f"row number {i}" for i in range(ROWS)]
    texts[_BAD_ROW] += f" <<{marker}>>"
    run = ChaosRun(folder, texts, **dict(options))
    if marker == "utf8":
        run.answers[_BAD_ROW] = "half a pair ?"
    return run


def _one_row(marker: str, options: Mapping[str, object], folder: Path) -> Account:
    """One bad row among good ones: what becomes of it, the case says; all others must succeed."""
    run = _with_bad_row(marker, options, folder)
    run.finish(limit=20 if marker == "killworker" else 1)
    if marker == "twice":
        assert run.paid_rows()[_BAD_ROW] == 2, "the engine did not answer twice"
    run.strike(f"row {marker}")  # its answer, or its dead letter, proves it
    return run.account()


# Reconcile and merge

_LEDGER_WRITES = 1
_MERGE_WRITES = 6
"""Two tables made and written, the note of what was merged, the job's note of published runs."""
_REPLAY_WRITES = 13
_LEDGER_OPERATIONS = 5
_MERGE_OPERATIONS = 21
_EVERY_WRITE = (*WRITES, TABLE)
_REPLAY_KEYS = r"^(?!.*progress\.json)"
"""A replay writes its progress as often as time allows."""


def _publishing() -> Iterator[Case]:
    for what, count, writes in (
        ("reconcile", _LEDGER_OPERATIONS, _LEDGER_WRITES),
        ("merge", _MERGE_OPERATIONS, _MERGE_WRITES),
    ):
        points = [(nth, when) for nth in range(1, count + 1) for when in _WHEN]
        yield Case(
            f"SIGKILL of {what}",
            "before and after each operation on the store, then run again",
            tuple(partial(_kill_publishing, what, Fault("kill", OPERATIONS, "", *p)) for p in points),
            dead=_REFUSED,
        )
        points = [(nth, when) for nth in range(1, writes + 1) for when in _WHEN]
        yield Case(
            f"SIGKILL of {what}",
            "before and after every write, those to the tables included, then run again",
            tuple(partial(_kill_publishing, what, Fault("kill", _EVERY_WRITE, "", *p)) for p in points),
            dead=_REFUSED,
        )
        yield Case(
            f"{what} has no more operations and writes than those",
            "",
            (
                partial(_no_more_publishing, what, count, OPERATIONS),
                partial(_no_more_publishing, what, writes, _EVERY_WRITE),
            ),
            dead=_REFUSED,
            strikes=False,
        )
        yield Case(
            f"disk full in {what}",
            "at every write, those to the tables included, then run again",
            tuple(
                partial(_fail_publishing, what, Fault("enospc", _EVERY_WRITE, nth=nth))
                for nth in range(1, writes + 1)
            ),
            dead=_REFUSED,
        )
    yield Case(
        "SIGKILL of a replay",
        "before and after every write (plan, worker, ledger, tables), then run again",
        tuple(partial(_kill_replay, nth, when) for nth in range(1, _REPLAY_WRITES + 1) for when in _WHEN),
    )
    yield Case("a replay has no more writes than those", "", (_no_more_replay_writes,), strikes=False)
    yield Case(
        "two merges at once",
        "started together, twice",
        (_two_merges, _two_merges),
        dead=_REFUSED,
        strikes=False,
    )


_REFUSED = {7: "engine_refused", 70: "engine_refused"}


@cache
def _committed_run() -> ChaosRun:
    """A run with two dead rows, committed; shared by cases that copy it."""
    texts = [f"row number {i}" for i in range(ROWS)]
    for row in _REFUSED:
        texts[row] += " <<refuse>>"
    run = ChaosRun(Path(tempfile.mkdtemp(prefix="chaos-")), texts)
    atexit.register(shutil.rmtree, run.folder, ignore_errors=True)
    run.finish()
    return run


@cache
def _published_run() -> ChaosRun:
    run = _committed_run().copied_to(Path(tempfile.mkdtemp(prefix="chaos-")))
    atexit.register(shutil.rmtree, run.folder, ignore_errors=True)
    assert run.account().dead == _REFUSED
    return run


def _before(what: str, folder: Path) -> ChaosRun:
    """A run at the point where `what` is due."""
    run = _committed_run().copied_to(folder)
    if what == "merge":
        assert run.attempt(what="reconcile") == 0
    return run


def _check_whole(run: ChaosRun, *standing: tuple[Mapping[int, str], Mapping[int, str]]) -> None:
    """Fail unless each of the two tables is, by itself, one of its versions as a whole."""
    found = run.published()
    assert found.results in [results for results, _ in standing], (
        f"{len(found.results)} results are half a run"
    )
    assert found.dead in [dead for _, dead in standing], f"half of the dead letters: {found.dead}"


def _answered(run: ChaosRun, but: Mapping[int, str]) -> dict[int, str]:
    return {row: answer for row, answer in run.answers.items() if row not in but}


def _kill_publishing(what: str, fault: Fault, folder: Path) -> Account:
    run = _before(what, folder)
    _killed(run, fault, what)
    _check_whole(run, ({}, {}), (_answered(run, _REFUSED), _REFUSED))
    return run.account()


def _fail_publishing(what: str, fault: Fault, folder: Path) -> Account:
    run = _before(what, folder)
    code = run.attempt(fault, what)
    assert code == 1, f"exit {code}"
    assert "No space left on device" in run.log(), "the error does not say why"
    _check_whole(run, ({}, {}), (_answered(run, _REFUSED), _REFUSED))
    return run.account()


def _no_more_publishing(what: str, count: int, operations: tuple[str, ...], folder: Path) -> Account:
    run = _before(what, folder)
    _no_more(run, what, count, operations=operations)
    return run.account()


def _kill_replay(nth: int, when: Literal["before", "after"], folder: Path) -> Account:
    run = _published_run().copied_to(folder)
    _killed(run, Fault("kill", _EVERY_WRITE, _REPLAY_KEYS, nth, when), "replay")
    _check_whole(run, (_answered(run, _REFUSED), _REFUSED), (run.answers, {}))
    assert run.attempt(what="replay") == 0, f"the replay cannot go on; log: {folder / 'log.txt'}"
    return run.verdict(replay=run_dir(run.plan.job, "replay"))


def _no_more_replay_writes(folder: Path) -> Account:
    run = _published_run().copied_to(folder)
    _no_more(run, "replay", _REPLAY_WRITES, _REPLAY_KEYS, _EVERY_WRITE)
    return run.verdict(replay=run_dir(run.plan.job, "replay"))


def _two_merges(folder: Path) -> Account:
    run = _before("merge", folder)
    both = [run.start(what="merge") for _ in range(2)]
    codes = [run.wait(p) for p in both]
    assert 0 in codes, f"neither merge succeeded: {codes}"
    return run.verdict()
