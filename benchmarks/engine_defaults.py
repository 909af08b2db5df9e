"""What each of the worker's defaults for vLLM is worth: the same job with one of them turned off at a time.

    python -m benchmarks.engine_defaults --airflow PYTHON --worker PYTHON --document docs/engine-defaults.md

Of the variants each takes its turn in a run, beside the job as it is; ratios are taken within a run and the
median over runs is told. The sets are those of `benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import ours
from benchmarks.peers.measure import Measured, run
from benchmarks.peers.rounds import NEEDED, OURS, write_job


@dataclass(frozen=True)
class Variant:
    """The job with one default turned off: an engine argument or an environment variable."""

    title: str
    prompts: str
    engine: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


VARIANTS = (
    Variant("the model compiled (`enforce_eager: false`)", "mixed", {"enforce_eager": False}),
    Variant(
        "vLLM's KV cache on a CPU, but for what else runs (`gpu_memory_utilization: 0.8`)",
        "mixed",
        {"gpu_memory_utilization": 0.8},
    ),
    Variant(
        "vLLM in processes of its own (`VLLM_ENABLE_V1_MULTIPROCESSING=1`)",
        "mixed",
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ),
    Variant("no prefix caching", "documents", {"enable_prefix_caching": False}),
    Variant("no chunked prefill", "mixed", {"enable_chunked_prefill": False}),
    Variant("8 sequences at once", "mixed", {"max_num_seqs": 8}),
)

_HEAD = """# What vLLM's defaults for offline work are worth

The output of `python -m benchmarks.engine_defaults`: one job of {rows} rows through the worker as it is, and
with one default turned off. SmolLM2-135M in bf16 on CPU ({cores} cores), {runs} run(s), ratios
within a run: above 1 the default is worth that much. A GPU has other ratios, and not the first three
defaults.

| turned off | held s, as it is | held s, so | held, ratio | engine, ratio | steps, ratio | tokens, ratio |
|---|--:|--:|--:|--:|--:|--:|
"""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_defaults", description=__doc__.splitlines()[0])
    parser.add_argument("--airflow", required=True, help="Python of Airflow's environment: it plans")
    parser.add_argument("--worker", required=True, help="Python of the worker's environment")
    parser.add_argument("--model", default=".build/models/smollm2", help="folder of the model")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--document", type=Path, default=Path("docs/engine-defaults.md"))
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="defaults-"))
    sets = {variant.prompts for variant in VARIANTS}
    runs: list[dict[str, Measured]] = []
    for _ in range(arguments.runs):
        found = {prompts: _run(Variant(prompts, prompts), scratch, arguments) for prompts in sorted(sets)}
        found |= {variant.title: _run(variant, scratch, arguments) for variant in VARIANTS}
        runs.append(found)
    text = _HEAD.format(rows=arguments.rows, cores=os.cpu_count(), runs=arguments.runs)
    arguments.document.write_text(text + "".join(_line(v, runs) for v in VARIANTS), encoding="utf-8")
    print(arguments.document.read_text(encoding="utf-8"))


def _run(variant: Variant, scratch: Path, arguments: argparse.Namespace) -> Measured:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    job = write_job(
        folder,
        variant.prompts,
        arguments.rows,
        engine=NEEDED | variant.engine,
        model=arguments.model,
        max_tokens=arguments.max_tokens,
    )
    ours.plan(job, arguments.airflow)
    measured = run(OURS, job, str(Path(arguments.worker).absolute()), variant.environment)
    print(f"{variant.title}: held {measured.held:.1f} s, engine {measured.engine:.1f} s", flush=True)
    if measured.returncode or measured.accepted != arguments.rows:
        raise SystemExit(f"{measured.accepted} rows, exit {measured.returncode}: {measured.log}")
    return measured


def _line(variant: Variant, runs: list[dict[str, Measured]]) -> str:
    pairs = [(found[variant.prompts], found[variant.title]) for found in runs]
    held = (statistics.median(m.held for m in side) for side in zip(*pairs, strict=True))
    ratios = (
        statistics.median(getattr(other, name) / getattr(default, name) for default, other in pairs)
        for name in ("held", "engine", "steps", "tokens")
    )
    cells = [variant.title, *(f"{s:.1f}" for s in held), *(f"{r:.2f}" for r in ratios)]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
