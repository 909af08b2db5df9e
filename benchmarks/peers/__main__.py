"""Measure this package beside its peers, and write `docs/benchmarks.md`.

    python -m benchmarks.peers --airflow PYTHON --worker PYTHON --peers PYTHON

Each cell is the median of `--runs` runs; peers take turns within a run, so that a slow spell of the
machine hits all of them. Ratios are ours over theirs in accepted rows per held second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import ours, prompt_sets
from benchmarks.peers.document import write_document
from benchmarks.peers.job import Job
from benchmarks.peers.measure import Measured, run

PEERS = ("ours", "llm_chat", "llm_chat_chunks", "run_batch", "ray_data", "datatrove_runner", "daft_prompt")
SLOW_PEERS = ("single_calls",)

SYSTEM = "You are a careful support assistant. Answer in one short sentence, in plain English."
TEMPLATE = "Summarise this ticket in one sentence.\n\n{text}"

NEEDED = {"max_model_len": 2048}
"""What the model needs; all that a defaults run gives."""
EQUAL = NEEDED | {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
"""The same arguments for everybody."""
TIGHT = EQUAL | {"num_gpu_blocks_override": 48}
"""Equal arguments with a KV cache that holds only some of the running prompts' prefixes."""


@dataclass(frozen=True)
class Round:
    """One table of the document: a prompt set under one set of engine arguments."""

    title: str
    prompts: str
    engine: dict[str, object]


ROUNDS = (
    Round("mixed, everyone's defaults", "mixed", NEEDED),
    Round("mixed, equal arguments", "mixed", EQUAL),
    Round("uniform, equal arguments", "uniform", EQUAL),
    Round("long-tailed, equal arguments", "long-tailed", EQUAL),
    Round("shared-prefix, equal arguments, tight KV cache", "shared-prefix", TIGHT),
    Round("30 % duplicates, equal arguments", "duplicates", EQUAL),
)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--airflow", required=True, help="Python of Airflow's environment")
    parser.add_argument("--worker", required=True, help="Python of the worker's environment")
    parser.add_argument("--peers", required=True, help="Python of the peers' environment")
    parser.add_argument("--model", default=".build/models/smollm2", help="folder of the model")
    parser.add_argument("--rows", type=int, default=192, help="rows of each prompt set")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, nargs="*", default=list(range(len(ROUNDS))), help="which tables"
    )
    parser.add_argument("--only", nargs="*", default=list(PEERS), help=f"of {PEERS + SLOW_PEERS}")
    parser.add_argument("--kill", action="store_true", help="also kill each at half its tokens, on mixed")
    parser.add_argument("--document", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    bench = _Bench(arguments)
    tables = [bench.table(ROUNDS[i]) for i in arguments.rounds]
    kills = bench.kills() if arguments.kill else {}
    write_document(arguments.document, arguments.rows, arguments.runs, tables, kills)


class _Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._scratch = Path(tempfile.mkdtemp(prefix="peers-"))

    def table(self, round_: Round) -> tuple[str, dict[str, Measured]]:
        """Medians of one round, by peer."""
        runs: dict[str, list[Measured]] = {peer: [] for peer in self._arguments.only}
        for number in range(self._arguments.runs):
            for peer in self._arguments.only:
                job = self._job(f"{round_.prompts}-{len(round_.engine)}-{number}-{peer}", round_)
                measured = run(peer, job, self._python(peer))
                _say(round_.title, number, peer, measured)
                runs[peer].append(measured)
        return round_.title, {peer: _median(found) for peer, found in runs.items()}

    def kills(self) -> dict[str, float]:
        """Tokens computed when killed at half and started again, over those of an undisturbed run."""
        round_ = ROUNDS[1]
        found = {}
        for peer in self._arguments.only:
            whole = run(peer, self._job(f"whole-{peer}", round_), self._python(peer))
            broken = run(
                peer, self._job(f"killed-{peer}", round_), self._python(peer), kill_at_tokens=whole.tokens / 2
            )
            _say("killed at half", 0, peer, broken)
            found[peer] = broken.tokens / whole.tokens if whole.tokens else float("nan")
        return found

    def _job(self, name: str, round_: Round) -> Job:
        folder = self._scratch / name
        folder.mkdir()
        prompts = self._scratch / f"{round_.prompts}.jsonl"
        if not prompts.exists():
            prompt_sets.write(round_.prompts, self._arguments.rows, prompts)
        job = Job(
            prompts=str(prompts),
            out=str(folder),
            model=str(Path(self._arguments.model).resolve()),
            system=SYSTEM,
            template=TEMPLATE,
            engine=dict(round_.engine),
        )
        job.save(folder / "job.json")
        if name.endswith("-ours"):
            ours.prepare(job, self._arguments.airflow)
        return job

    def _python(self, peer: str) -> str:
        python: str = self._arguments.worker if peer == "ours" else self._arguments.peers
        return str(Path(python).absolute())


def _median(runs: list[Measured]) -> Measured:
    """The run in the middle by held seconds (all its figures come from one run)."""
    return sorted(runs, key=lambda m: m.held)[len(runs) // 2]


def _say(title: str, number: int, peer: str, m: Measured) -> None:
    line = {
        "round": title,
        "run": number,
        "peer": peer,
        "held": round(m.held, 1),
        "accepted": m.accepted,
        "engine": round(m.engine, 1),
        "steps": m.steps,
        "tokens": m.tokens,
        "first_durable": m.first_durable and round(m.first_durable, 1),
        "returncode": m.returncode,
    }
    print(json.dumps(line), flush=True)
    if m.returncode or not m.accepted:
        print(m.log.read_text(errors="replace")[-2000:], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
