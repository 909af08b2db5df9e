"""The benchmark's document: tables, a picture, and what they do not show."""

from __future__ import annotations

import os
import platform
import signal
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.records import Record, Records, by_peer
from benchmarks.peers.rounds import FAULTS, MEMORY_ROWS, OURS, ROUNDS, Round, memory_round

NAMES = {
    OURS: "airflow_batchinfer worker",
    "llm_chat": "one `LLM.chat` call",
    "llm_chat_chunks": "`LLM.chat` in chunks, a write after each",
    "single_calls": "a loop of single calls",
    "run_batch": "`vllm run-batch`",
    "ray_data": "Ray Data LLM",
    "datatrove_runner": "datatrove InferenceRunner",
    "daft_prompt": "Daft `prompt`",
}

_HEAD = """# Beside the peers

The output of `make bench`: the same prompts, model and decoding through each, on one machine.
Ratios are ours over theirs: above 1 we are faster. They carry over to a GPU in kind, not in size; engine
steps and computed tokens carry over better than seconds.

Measured on {machine}, {rows} rows a set, SmolLM2-135M-Instruct in bf16 on CPU. Peers take turns; figures are
medians over runs, ratios are taken within a run: each peer's is of the runs that ours ran beside it. The
single measurements are in [{raw}]({raw}), newer ones with their time and commit.

- *held*: seconds from process start to exit; on a GPU this is what is paid for.
- *engine*: seconds from the engine's first step to its last; *steps* and *tokens computed* are counted
  inside each peer's own vLLM by the same plugin (`benchmarks/peers/meter`).
- *first row safe*: seconds until an answer could be read from disk.
- *wanted*: what this project set itself, where it did; **bold** where it is missed.
"""

_PICTURE = "equal"
"""The round that is drawn: with everyone's defaults a CPU shows start-up above all."""
_TIE = 0.05
"""Two rates this close are called a tie."""

_FOOT = """
## What this does not show

- Accepted rows of Ray Data LLM and Daft may include answers that were cut off: they do not hand over the
  finish reason.
- Ray Data LLM does not start with vLLM's default KV cache on this machine, 92 % of its memory; it is given
  4 GiB. It is told of eight CPUs, as its actors wait for one another with fewer.
- `LLM.chat` and Daft are given rows that a user's loop has parsed, line by line; the malformed line ends that
  loop. The others read the file themselves.
- Our split, reconcile and merge run where no accelerator is held; they are not in *held*{around}.
  The peers read their input and write their results within *held*.
- Identical prompts are sent once by us (`sharding.dedup`); the peers answer each.
- With everyone's defaults most of the difference on a CPU is start-up: vLLM compiles the model, clears a KV
  cache of nearly all memory and keeps a core free of the model, and our defaults for a CPU do none of it
  (docs/engine.md). On a GPU they are vLLM's own. With equal arguments what is left of it is that vLLM starts
  three processes and we one; nobody keeps a core free there (`VLLM_CPU_NUM_OF_RESERVED_CPU=0`).
- Only the mixed set is measured with everyone's defaults and with all peers: on the other sets start-up
  would hide what they are for.
- A set of so few rows is start-up for the greater part. On a long shard the ratio of *held* goes to that of
  *engine*.
"""


_KILLED = """
## Killed at half (SIGKILL), started again

Tokens computed in all, over those of an undisturbed run of the same peer (one try each). Ours writes a part
each 64 rows or 5 s, datatrove a checkpoint each 64 documents, Ray each block of 64 rows; the loop in chunks
leaves out what it has written. Lost is what was in flight and what no checkpoint holds yet: much of these few
rows, next to nothing of a long shard.

"""


def write_document(path: Path, records: Records) -> list[str]:
    """Write the Markdown document, and a picture of one of its tables beside it.

    Returns:
        One line for each ratio that is below what its round wants.
    """
    measured = [(r, found) for r in ROUNDS if (found := by_peer(records.of(r.name)))]
    rows = sorted(
        {record.rows for _, found in measured for runs in found.values() for record in runs.values()}
    )
    text = _HEAD.format(
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        rows=" or ".join(map(str, rows)),
        raw=path.with_suffix(".jsonl").name,
    )
    missed: list[str] = []
    if measured:
        picture = path.with_suffix(".svg")
        shown = next((pair for pair in measured if pair[0].name == _PICTURE), measured[0])
        picture.write_text(_bars(*shown), encoding="utf-8")
        text += f"\n![accepted rows per held second, {shown[0].title}]({picture.name})\n"
    for round_, found in measured:
        table, below = _table(round_, found)
        text += f"\n## {round_.title[0].upper()}{round_.title[1:]}\n\n{table}"
        missed += below
    text += _kills(records) + _faults(records) + _memory(records)
    text += "\n## Where we tie or lose\n\n" + _behind(measured, records)
    path.write_text(text + _FOOT.format(around=_around(records)), encoding="utf-8")
    return missed


def _around(records: Records) -> str:
    """How long the steps around our worker take."""
    runs = [r for r in records.of("whole") if r.peer == OURS and r.around is not None]
    if not runs:
        return ""
    return f"\n  ({runs[-1].around:.0f} s for {runs[-1].rows} rows, the start of two Pythons included)"


def ratios(rate: Callable[[Record], float], found: dict[str, dict[int, Record]]) -> dict[str, float]:
    """Ours over each peer's: medians over the runs that both have."""
    ours = found.get(OURS, {})
    result = {}
    for peer, runs in found.items():
        both = [rate(ours[n]) / rate(r) for n, r in runs.items() if n in ours and rate(r)]
        if peer != OURS and both:
            result[peer] = statistics.median(both)
    return result


def _rate_of(round_: Round) -> Callable[[Record], float]:
    return (lambda r: r.held_rate) if round_.rate == "held" else (lambda r: r.engine_rate)


def _table(round_: Round, found: dict[str, dict[int, Record]]) -> tuple[str, list[str]]:
    reached = ratios(_rate_of(round_), found)
    best = min(reached, key=lambda peer: reached[peer], default=None)
    unit = "held s" if round_.rate == "held" else "engine s"
    heads = ["who", "runs", "accepted", f"rows / {unit}", "ours over it", "wanted"]
    heads += ["held s", "engine s", "steps", "tokens computed", "first row safe"]
    text = _heading(heads)
    missed = []
    for peer in (p for p in round_.peers if p in found):
        runs = list(found[peer].values())
        wanted = [
            round_.wanted[name]
            for name in (peer, *(["best"] if peer == best else []))
            if name in round_.wanted
        ]
        goal = max(wanted, default=None)
        ratio = f"{reached[peer]:.2f}" if peer in reached else ""
        if goal is not None and peer in reached and reached[peer] < goal:
            missed.append(f"{round_.title}: {ratio} of {NAMES[peer]}, {goal:.2f} wanted")
            ratio = f"**{ratio}**"
        rate = _rate_of(round_)
        cells = [
            NAMES[peer],
            len(runs),
            f"{_median(runs, lambda r: r.accepted):.0f}/{runs[0].rows}",
            f"{_median(runs, rate):.2f}",
            ratio,
            "" if goal is None else f"≥ {goal:.2f}",
            f"{_median(runs, lambda r: r.held):.1f}",
            f"{_median(runs, lambda r: r.engine):.1f}",
            f"{_median(runs, lambda r: r.steps):.0f}",
            f"{_median(runs, lambda r: r.tokens):.0f}",
            _first(runs),
        ]
        text += _row(cells)
    return text, missed


def _behind(measured: Sequence[tuple[Round, dict[str, dict[int, Record]]]], records: Records) -> str:
    """A line for each peer that we are not clearly ahead of: in any round by either rate, or when killed."""
    rates: dict[str, Callable[[Record], float]] = {
        "accepted rows per held second": lambda r: r.held_rate,
        "accepted rows per engine second": lambda r: r.engine_rate,
    }
    compared = [
        (round_.title, unit, peer, ratio)
        for round_, found in measured
        for unit, rate in rates.items()
        for peer, ratio in ratios(rate, found).items()
    ]
    paid = _paid_when_killed(records)
    compared += [
        ("killed at half", "tokens paid over needed, theirs over ours", peer, theirs / paid[OURS])
        for peer, theirs in paid.items()
        if peer != OURS and OURS in paid
    ]
    for fault, title in FAULTS.items():
        accepted = {r.peer: r.accepted for r in records.of(fault)}
        compared += [
            (title, "good rows accepted", peer, accepted[OURS] / rows)
            for peer, rows in accepted.items()
            if rows > accepted.get(OURS, rows)
        ]
    text = f"Ours over theirs unless said; a tie is within {_TIE:.0%}.\n\n"
    text += _heading(["set and arguments", "what", "who", "ratio", ""], align="---")
    for title, unit, peer, ratio in compared:
        if ratio <= 1 + _TIE:
            word = "tie" if ratio >= 1 - _TIE else "we lose"
            text += _row([title, unit, NAMES[peer], f"{ratio:.2f}", word])
    return text


def _heading(heads: Sequence[str], align: str = "--:") -> str:
    """The first two lines of a table: a column of words, then others, aligned as numbers unless said."""
    return _row(heads) + "|---" + f"|{align}" * (len(heads) - 1) + "|\n"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _median(runs: list[Record], value: Callable[[Record], float]) -> float:
    return statistics.median(value(r) for r in runs)


def _first(runs: list[Record]) -> str:
    seen = [r.first_durable for r in runs if r.first_durable is not None]
    return f"{statistics.median(seen):.0f} s" if seen else "at exit"


def _kills(records: Records) -> str:
    paid = _paid_when_killed(records)
    if not paid:
        return ""
    killed, whole = by_peer(records.of("killed")), by_peer(records.of("whole"))
    text = _KILLED
    text += _heading(["who", "accepted", "tokens paid", "tokens needed", "paid over needed"])
    for peer, ratio in paid.items():
        record, needed = killed[peer][0], whole[peer][0].tokens
        cells = [f"{record.accepted}/{record.rows}", f"{record.tokens:,}", f"{needed:,}"]
        text += _row([NAMES[peer], *cells, f"{ratio:.2f}"])
    return text


def _paid_when_killed(records: Records) -> dict[str, float]:
    """Tokens that each peer computed in all when killed once, over those of its undisturbed run."""
    killed, whole = by_peer(records.of("killed")), by_peer(records.of("whole"))
    return {peer: runs[0].tokens / whole[peer][0].tokens for peer, runs in killed.items()}


def _faults(records: Records) -> str:
    found = {fault: by_peer(records.of(fault)) for fault in FAULTS}
    if not any(found.values()):
        return ""
    text = "\n## One bad row\n\nRows accepted of the good ones, the exit status, and what was held "
    text += (
        "(one try\neach, of some with other work beside it; who answered nothing for five minutes hangs).\n\n"
    )
    text += _heading(["who", *FAULTS.values()], align="---")
    for peer in NAMES:
        cells = []
        for fault in FAULTS:
            record = found[fault].get(peer, {}).get(0)
            if record is not None:
                cells.append(f"{record.accepted} of {record.rows - 1}, {_end_of(record)}")
        if cells:
            text += _row([NAMES[peer], *cells])
    return text


def _end_of(record: Record) -> str:
    if not record.held:
        return f"exit {record.returncode}, refused before anything was held"
    # A peer that hangs is ended by the benchmark with SIGKILL.
    end = "hung, ended" if record.returncode == -signal.SIGKILL else f"exit {record.returncode}"
    return f"{end}, {record.held:.0f} s held"


def _memory(records: Records) -> str:
    few, many = (by_peer(records.of(memory_round(rows))) for rows in MEMORY_ROWS)
    if not many:
        return ""
    text = "\n## Peak memory\n\nAll processes of each together, in MiB, shared pages once; an engine that "
    text += "answers at once, a KV cache of 1 GiB (one try each).\n\n"
    text += _heading(["who", *(f"{rows:,} rows" for rows in MEMORY_ROWS), "more", "accepted"])
    for peer, runs in many.items():
        if peer in few:
            low, high = few[peer][0].peak or 0.0, runs[0].peak or 0.0
            figures = (low, high, high - low, runs[0].accepted)
            text += _row([NAMES[peer], *(f"{figure:,.0f}" for figure in figures)])
    return text


def _bars(round_: Round, found: dict[str, dict[int, Record]]) -> str:
    """A plain bar chart as SVG."""
    rates = {p: _median(list(found[p].values()), lambda r: r.held_rate) for p in round_.peers if p in found}
    top = max(rates.values(), default=1.0) or 1.0
    height = 28 * len(rates) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{height}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">Accepted rows per held second: {round_.title}</text>',
    ]
    for index, (peer, rate) in enumerate(rates.items()):
        y = 34 + 28 * index
        width = 420 * rate / top
        colour = "#2563eb" if peer == OURS else "#94a3b8"
        parts.append(f'<text x="8" y="{y + 14}">{NAMES[peer].replace("`", "")}</text>')
        parts.append(f'<rect x="320" y="{y}" width="{width:.0f}" height="19" fill="{colour}"/>')
        parts.append(f'<text x="{326 + width:.0f}" y="{y + 14}">{rate:.2f}</text>')
    return "\n".join([*parts, "</svg>\n"])
