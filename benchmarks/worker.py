"""The worker's own cost: what it does beside the engine, with the engine replaced by an instant one.

    .build/worker/bin/python -m benchmarks.worker --document docs/benchmarks-worker.md

(c) CPU seconds a row for reading, rendering, admission, validation and parts, as rows per second and core,
start-up apart (the difference of two shard sizes); and building prompts beside the tokenizer's own batch
call on the same texts with the same threads. (d) Peak memory with 10,000 and with a million rows in a
shard. `benchmarks.peers` has (a) and (b).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEAST_ROWS_PER_CORE = 10_000
LEAST_TOKENISE_RATIO = 0.9
MOST_MEMORY_GROWTH = 0.10

_HEAD = """# What the worker costs beside the engine

The output of `python -m benchmarks.worker`: the engine is replaced by an instant one. {cores} cores, medians
of {runs} runs, peak memory of one.

"""

_SAMPLE_SECONDS = 0.02
_SMALL, _LARGE = 20_000, 220_000
_FEW, _MANY = 10_000, 1_000_000
_BATCH = 512


@dataclass(frozen=True)
class Cost:
    """One worker process: CPU seconds of all its threads, and its peak resident memory in MiB."""

    cpu: float
    peak: float


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: str
    limit: str
    reached: bool


def rows_per_core(runs: int) -> list[Figure]:
    """(c) Rows per second and core, for text that is checked for blanks, and for JSON under a schema."""
    return [_rows_per_core(kind, runs) for kind in ("text", "json")]


def _rows_per_core(kind: str, runs: int) -> Figure:
    rates = []
    for _ in range(runs):
        small, large = (worker(kind, rows).cpu for rows in (_SMALL, _LARGE))
        rates.append((_LARGE - _SMALL) / (large - small))
    rate = statistics.median(rates)
    return Figure(
        f"(c) rows/s a core, {kind}",
        f"{rate:,.0f}",
        f"at least {LEAST_ROWS_PER_CORE:,}",
        rate >= LEAST_ROWS_PER_CORE,
    )


def memory(_: int) -> list[Figure]:
    """(d) Peak memory by rows in the shard."""
    few, many = (worker("text", rows).peak for rows in (_FEW, _MANY))
    return [
        Figure(
            f"(d) peak memory, {_MANY:,} rows beside {_FEW:,}",
            f"{many:.0f} MiB / {few:.0f} MiB = {many / few:.3f}",
            f"within {MOST_MEMORY_GROWTH:.0%}",
            many / few <= 1 + MOST_MEMORY_GROWTH,
        )
    ]


def tokenise(folder: str, runs: int) -> list[Figure]:
    """(c) Building prompts (render, chat template, token ids) beside the tokenizer's batch call alone."""
    from airflow_batchinfer.prompts.builder import Prepared, PromptBuilder
    from airflow_batchinfer.prompts.tokens import load_tokenizer
    from tests.plans import job

    system = "You read a support ticket and answer with one word that says which team has to see it. " * 8
    spec = job(
        Path(),
        prompt={"template": "Ticket:\n{{ text }}\n\nTeam:", "system": system},
        model={"name": folder, "engine": {"max_model_len": 4096}},
    )
    tokenizer = load_tokenizer(spec)
    builder = PromptBuilder(spec, tokenizer, 4096)
    rows = [{"text": _text(i, 300)} for i in range(4 * _BATCH)]
    batches = [rows[i : i + _BATCH] for i in range(0, len(rows), _BATCH)]
    prompts = [p for batch in batches for p in builder.build(batch)]
    texts = [
        tokenizer.decode(p.prompts[0].token_ids or []) if isinstance(p, Prepared) else "" for p in prompts
    ]
    backend = tokenizer.backend_tokenizer
    ratios = []
    for _ in range(runs):
        ours = _seconds(lambda: [builder.build(batch) for batch in batches])
        theirs = _seconds(
            lambda: [
                backend.encode_batch_fast(texts[i : i + _BATCH], add_special_tokens=False)
                for i in range(0, len(texts), _BATCH)
            ]
        )
        ratios.append(theirs / ours)
    ratio = statistics.median(ratios)
    return [
        Figure(
            "(c) prompts/s, of the tokenizer's batch call",
            f"{ratio:.2f}",
            f"at least {LEAST_TOKENISE_RATIO}",
            ratio >= LEAST_TOKENISE_RATIO,
        )
    ]


def worker(kind: str, rows: int) -> Cost:
    """Run one shard of `rows` rows through a worker process with an instant engine."""
    with tempfile.TemporaryDirectory(prefix="batchinfer-bench-") as folder:
        # In a process of its own, so that what it takes to make the plan is not in the worker's peak.
        made = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.worker",
                "--plan",
                folder,
                "--kind",
                kind,
                "--rows",
                str(rows),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "airflow_batchinfer.worker", "--store", folder),
                *("--folder", made.stdout.strip(), "--shards", "0"),
            ],
            stderr=subprocess.DEVNULL,
        )
        peak = 0.0
        while True:
            peak = max(peak, _peak_of(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(_SAMPLE_SECONDS)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"the worker ended with code {process.returncode}")
        return Cost(usage.ru_utime + usage.ru_stime, peak)


def plan(folder: Path, kind: str, rows: int) -> str:
    """Freeze one shard of `rows` rows; returns the run's folder."""
    from tests.plans import job, plan_run

    schema = {
        "type": "object",
        "properties": {"team": {"enum": ["billing", "it", "sales"]}, "score": {"type": "integer"}},
        "required": ["team", "score"],
    }
    task = {"type": "json", "schema": schema} if kind == "json" else {"type": "generate"}
    return plan_run(job(folder, task=task), [(_text(i, 60) for i in range(rows))]).folder


def _text(number: int, words: int) -> str:
    return f"Ticket {number}: " + " ".join(f"word{(number * 31 + i * 7) % 997}" for i in range(words // 2))


def _peak_of(pid: int) -> float:
    """Peak resident memory so far, in MiB; the kernel forgets it once the process is a corpse."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(figures: list[Figure]) -> str:
    """The figures as Markdown."""
    lines = ["| figure | measured | wanted | reached |", "|---|---|---|---|"]
    lines += [f"| {f.name} | {f.value} | {f.limit} | {'yes' if f.reached else '**no**'} |" for f in figures]
    return "\n".join(lines)


def main() -> int:
    """See the module. Exits with 1 if a figure is not reached."""
    parser = argparse.ArgumentParser(prog="benchmarks.worker", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each figure; the median counts")
    parser.add_argument("--document", type=Path, help="write the table here as Markdown")
    parser.add_argument("--tokenizer", default=".build/models/smollm2", help="folder of a model")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="text", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=_FEW, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan:
        print(plan(arguments.plan, arguments.kind, arguments.rows))
        return 0
    figures = [
        *rows_per_core(arguments.runs),
        *tokenise(arguments.tokenizer, arguments.runs),
        *memory(arguments.runs),
    ]
    print(table(figures))
    if arguments.document:
        text = _HEAD.format(cores=os.cpu_count(), runs=arguments.runs) + table(figures) + "\n"
        arguments.document.write_text(text, encoding="utf-8")
    return 0 if all(figure.reached for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
