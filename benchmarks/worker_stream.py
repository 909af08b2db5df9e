"""The worker's stream of rows beside vLLM's own ways to run a batch, on the same engine.

    python -m benchmarks.worker_stream --airflow PYTHON --worker PYTHON --document docs/benchmarks-worker.md

(a) The whole worker, checkpointing on, against one raw `LLM.chat` call in file order, by the engine's own
seconds (its first step to its last): prompts that share nothing, and shuffled prompts that share prefixes
while the KV cache is tight. (b) Against `vllm run-batch` and `LLM.chat` in chunks with a write after
each, by accepted rows per second the process was held: equal engine arguments, and everyone's defaults.
Peers take turns within a run, in the other direction every second run; each figure is the median over
runs of the ratio within one run. A first run of a few rows is thrown away: on a new machine it pays for
caches that vLLM and the file system keep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import ours, prompt_sets
from benchmarks.peers.__main__ import EQUAL, NEEDED, SYSTEM, TEMPLATE, TIGHT
from benchmarks.peers.job import Job
from benchmarks.peers.measure import Measured, run

OURS = "ours"
_MAX_TOKENS = 32


def stream_rate(measured: Measured) -> float:
    """Accepted rows per second of engine time."""
    return measured.accepted / measured.engine if measured.engine else 0.0


def held_rate(measured: Measured) -> float:
    """Accepted rows per second that the process was held, start to exit."""
    return measured.accepted / measured.held


@dataclass(frozen=True)
class Trial:
    """One table: a prompt set, engine arguments, the peers, and the ratio each has to reach."""

    title: str
    prompts: str
    engine: dict[str, object]
    limits: dict[str, float]
    rate: Callable[[Measured], float]


TRIALS = (
    Trial("(a) uniform prompts", "uniform", EQUAL, {"llm_chat": 0.97}, stream_rate),
    Trial("(a) shared prefixes, tight KV cache", "documents", TIGHT, {"llm_chat": 1.3}, stream_rate),
    Trial(
        "(b) mixed prompts, equal arguments",
        "mixed",
        EQUAL,
        {"llm_chat_chunks": 1.0, "run_batch": 1.0},
        held_rate,
    ),
    Trial(
        "(b) mixed prompts, everyone's defaults",
        "mixed",
        NEEDED,
        {"llm_chat_chunks": 1.0, "run_batch": 1.0},
        held_rate,
    ),
)


def main() -> None:
    """See the module. Exits with 1 if a ratio is below its limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.worker_stream", description=__doc__)
    parser.add_argument("--airflow", required=True, help="Python of Airflow's environment: it plans")
    parser.add_argument("--worker", required=True, help="Python of the worker's environment")
    parser.add_argument("--model", default=".build/models/smollm2", help="folder of the model")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trials", type=int, nargs="*", default=list(range(len(TRIALS))))
    parser.add_argument("--document", type=Path, help="write the tables here as Markdown")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="stream-"))
    sections = []
    missed = []
    _once(TRIALS[0], [OURS], 8, scratch / "warm-up", arguments)
    for number in arguments.trials:
        trial = TRIALS[number]
        peers = [OURS, *trial.limits]
        runs = [
            _once(trial, peers[:: 1 if i % 2 else -1], arguments.rows, scratch / f"{number}-{i}", arguments)
            for i in range(arguments.runs)
        ]
        sections.append(_section(trial, runs))
        missed += [
            f"{trial.title}: {peer} {ratio:.2f} < {trial.limits[peer]}"
            for peer, ratio in _ratios(trial, runs).items()
            if ratio < trial.limits[peer]
        ]
    text = _HEADER.format(rows=arguments.rows, runs=arguments.runs) + "\n".join(sections)
    if arguments.document:
        arguments.document.write_text(text, encoding="utf-8")
    print(text)
    sys.exit("\n".join(missed) if missed else 0)


def _once(
    trial: Trial, peers: Sequence[str], rows: int, scratch: Path, arguments: argparse.Namespace
) -> dict[str, Measured]:
    """Each of the peers, one after another."""
    measured = {}
    for peer in peers:
        folder = scratch / peer
        folder.mkdir(parents=True)
        prompts = folder / "prompts.jsonl"
        prompt_sets.write(trial.prompts, rows, prompts)
        job = Job(
            prompts=str(prompts),
            out=str(folder),
            model=str(Path(arguments.model).resolve()),
            system=SYSTEM,
            template=TEMPLATE,
            engine=dict(trial.engine),
            max_tokens=_MAX_TOKENS,
        )
        job.save(folder / "job.json")
        if peer == OURS:
            ours.prepare(job, arguments.airflow)
        result = run(peer, job, str(Path(arguments.worker).absolute()))
        line = {"trial": trial.title, "peer": peer, "rows/s": round(trial.rate(result), 3)}
        line |= {"held": round(result.held, 1), "engine": round(result.engine, 2)}
        line |= {"steps": result.steps, "tokens": result.tokens, "accepted": result.accepted}
        print(json.dumps(line), flush=True)
        if result.returncode:
            print(result.log.read_text(errors="replace")[-2000:], file=sys.stderr, flush=True)
        measured[peer] = result
    return measured


def _ratios(trial: Trial, runs: list[dict[str, Measured]]) -> dict[str, float]:
    """Ours over each peer's, the median over runs."""
    return {
        peer: statistics.median(trial.rate(r[OURS]) / max(trial.rate(r[peer]), 1e-9) for r in runs)
        for peer in trial.limits
    }


def _section(trial: Trial, runs: list[dict[str, Measured]]) -> str:
    ratios = _ratios(trial, runs)
    unit = "engine second" if trial.rate is stream_rate else "held second"
    lines = [
        f"## {trial.title}\n",
        f"| who | rows per {unit} | ours is | wanted | held s | engine s | steps | computed | accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for peer in (OURS, *trial.limits):
        found = [r[peer] for r in runs]

        def middle(value: Callable[[Measured], float], found: list[Measured] = found) -> float:
            return statistics.median(value(m) for m in found)

        ratio = f"{ratios[peer]:.2f} ×" if peer in ratios else ""
        limit = f"≥ {trial.limits[peer]:.2f}" if peer in ratios else ""
        lines.append(
            f"| {peer} | {middle(trial.rate):.2f} | {ratio} | {limit} | {middle(lambda m: m.held):.1f} "
            f"| {middle(lambda m: m.engine):.1f} | {middle(lambda m: m.steps):.0f} "
            f"| {middle(lambda m: m.tokens):.0f} | {middle(lambda m: m.accepted):.0f} |"
        )
    return "\n".join(lines) + "\n"


_HEADER = """# The worker's stream beside vLLM's own

Written by `python -m benchmarks.worker_stream`: SmolLM2-135M on CPU, {rows} prompts a set, medians of
{runs} runs. Ratios are taken within a run, so a slow spell of the machine hits both sides. Engine steps
and computed tokens carry over to a GPU better than seconds do.

"""


if __name__ == "__main__":
    main()
