"""Measure this package beside its peers, and write `docs/benchmarks.md`.

    python -m benchmarks.peers --airflow PYTHON --worker PYTHON --peers PYTHON

Peers take turns within a run, in the other direction every second run, so that a slow spell of the machine
hits all of them; ratios are taken within a run, and medians over runs: a first run that fills a cache for
compiled code does not decide. Each measurement is kept in a file at once, and whoever has enough is not
measured again, but for ours, which is in each run; `--report` only writes the document.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.peers import ours
from benchmarks.peers.document import write_document
from benchmarks.peers.measure import Measured, refused_before_start, run
from benchmarks.peers.poison import poison_of
from benchmarks.peers.prompt_sets import DEADLY_SET
from benchmarks.peers.records import Record, Records
from benchmarks.peers.rounds import (
    EQUAL,
    EVERYBODY,
    FAULTS,
    KILLED,
    MEMORY,
    MEMORY_ROWS,
    OURS,
    ROUNDS,
    SLOWEST,
    Round,
    memory_round,
    write_job,
)

_OTHERS_ENVIRONMENT = ("ray_data", "datatrove_runner", "daft_prompt")
_KILL_ROWS = 3
"""Times the rows of the other rounds: what is in flight has to be a small part of a run that is killed."""
_KILL_CHECKPOINT = 64
"""Rows between checkpoints where a run is killed, of peers that have to be asked for them."""
_FAULT_ROWS = 24
_FEW_TOKENS = 2
_FAULT_SECONDS = 300.0
"""A peer that takes longer for the few rows with a fault among them hangs."""


def main() -> int:
    """See the module. Returns 1 if a ratio is below what is wanted."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--airflow", required=True, help="Python of Airflow's environment: it plans")
    parser.add_argument("--worker", required=True, help="Python of the worker's environment")
    parser.add_argument("--peers", required=True, help="Python of the peers' environment")
    parser.add_argument("--model", default=".build/models/smollm2", help="folder of the model")
    parser.add_argument("--rows", type=int, default=128, help="rows of each prompt set")
    parser.add_argument("--max-tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", nargs="*", default=[r.name for r in ROUNDS], help="which tables")
    parser.add_argument("--only", nargs="*", default=[*EVERYBODY, SLOWEST], help="which peers")
    parser.add_argument("--kill", action="store_true", help="also kill each peer at half its tokens")
    parser.add_argument("--faults", action="store_true", help="also give each peer one bad row")
    parser.add_argument("--memory", action="store_true", help="also take peaks at 1,000 and 100,000 rows")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--document", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    records = Records(arguments.document.with_suffix(".jsonl"))
    if not arguments.report:
        bench = _Bench(arguments, records)
        for round_ in ROUNDS:
            if round_.name in arguments.rounds:
                bench.measure(round_)
        if arguments.kill:
            bench.kill()
        if arguments.faults:
            bench.faults()
        if arguments.memory:
            bench.memory()
    missed = write_document(arguments.document, records)
    print("\n".join(missed) or f"every ratio that is wanted is reached: {arguments.document}")
    return 1 if missed else 0


class _Bench:
    def __init__(self, arguments: argparse.Namespace, records: Records) -> None:
        self._arguments = arguments
        self._records = records
        self._scratch = Path(tempfile.mkdtemp(prefix="peers-"))
        self._code = _commit()

    def measure(self, round_: Round) -> None:
        """Runs of all who have too few on record; ours is in each, as a ratio is of one run."""
        while short := [p for p in self._peers(round_.peers) if self._lacks(round_, p)]:
            number = self._records.next_run(round_.name)
            turns = [p for p in round_.peers if p == OURS or p in short]
            for peer in turns[:: 1 if number % 2 else -1]:
                self._keep(round_.name, peer, number, self._run(peer, round_))

    def kill(self) -> None:
        """Kill each peer at half of the tokens that an undisturbed run of it computes, and start it again."""
        round_ = next(r for r in ROUNDS if r.name == KILLED)
        rows = _KILL_ROWS * self._arguments.rows
        for peer in self._peers(EVERYBODY):
            if not self._records.has("whole", peer, 0):
                self._keep("whole", peer, 0, self._run(peer, round_, rows=rows), rows)
            if not self._records.has("killed", peer, 0):
                needed = next(r.tokens for r in self._records.of("whole") if r.peer == peer)
                killed = self._run(peer, round_, rows=rows, kill_at_tokens=needed / 2)
                self._keep("killed", peer, 0, killed, rows)

    def faults(self) -> None:
        """One fault in the input of each peer."""
        for fault in FAULTS:
            for peer in self._peers(EVERYBODY):
                if not self._records.has(fault, peer, 0):
                    round_ = Round(fault, FAULTS[fault], fault, EQUAL)
                    self._keep(fault, peer, 0, self._run(peer, round_, rows=_FAULT_ROWS), _FAULT_ROWS)

    def memory(self) -> None:
        """Peak memory with few and with many rows, the engine an instant one."""
        for rows in MEMORY_ROWS:
            for peer in self._peers(EVERYBODY):
                name = memory_round(rows)
                if not self._records.has(name, peer, 0):
                    measured = self._run(peer, MEMORY, rows=rows, max_tokens=_FEW_TOKENS)
                    self._keep(name, peer, 0, measured, rows)

    def _lacks(self, round_: Round, peer: str) -> bool:
        return self._records.runs(round_.name, peer) < self._arguments.runs

    def _peers(self, of: Sequence[str]) -> list[str]:
        return [peer for peer in of if peer in self._arguments.only]

    def _keep(self, round_: str, peer: str, number: int, measured: Measured, rows: int | None = None) -> None:
        record = Record.of(round_, peer, number, rows or self._arguments.rows, measured, code=self._code)
        self._records.add(record)
        print(asdict(record), flush=True)
        if measured.returncode or not measured.accepted:
            print(measured.log.read_text(errors="replace")[-2000:], file=sys.stderr, flush=True)

    def _run(
        self,
        peer: str,
        round_: Round,
        *,
        kill_at_tokens: float | None = None,
        rows: int | None = None,
        max_tokens: int | None = None,
    ) -> Measured:
        folder = Path(tempfile.mkdtemp(prefix=f"{round_.name}-{peer}-", dir=self._scratch))
        job = write_job(
            folder,
            round_.prompts,
            rows or self._arguments.rows,
            engine=round_.engine,
            model=self._arguments.model,
            max_tokens=max_tokens or self._arguments.max_tokens,
            checkpoint_rows=_KILL_CHECKPOINT if kill_at_tokens else 0,
        )
        around = 0.0
        if peer == OURS:
            try:
                around = ours.plan(job, self._arguments.airflow)
            except subprocess.CalledProcessError as refused:
                return refused_before_start(refused.returncode)
        environment = self._arguments.peers if peer in _OTHERS_ENVIRONMENT else self._arguments.worker
        variables = dict(round_.environment)
        if round_.prompts == DEADLY_SET:
            variables |= poison_of(job)
        measured = run(
            peer,
            job,
            str(Path(environment).absolute()),
            variables,
            kill_at_tokens=kill_at_tokens,
            memory=round_.instant,
            **({"limit": _FAULT_SECONDS} if round_.name in FAULTS else {}),
        )
        if peer == OURS and not measured.returncode:
            around += ours.publish(job, self._arguments.airflow)
            measured = replace(measured, around=around)
        return measured


def _commit() -> str | None:
    """The commit that is measured, `+` if there are changes; none outside a repository."""
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(git, capture_output=True, text=True, check=False)
    return described.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
