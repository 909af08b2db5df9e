"""The benchmark's document: tables, a picture, and what they do not show."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers.measure import Measured

NAMES = {
    "ours": "airflow_batchinfer worker",
    "llm_chat": "one `LLM.chat` call",
    "llm_chat_chunks": "`LLM.chat` in chunks, a write between",
    "single_calls": "a loop of single calls",
    "run_batch": "`vllm run-batch`",
    "ray_data": "Ray Data LLM",
    "datatrove_runner": "datatrove InferenceRunner",
    "daft_prompt": "Daft `prompt`",
}

_HEAD = """# Beside the peers

The output of `make bench`: the same prompts, model and decoding through each, on one machine in one go.
Ratios are ours over theirs: above 1 we are faster. They carry over to a GPU in kind, not in size; engine
steps and computed tokens carry over better than seconds.

Measured {when} on {machine}, {rows} rows a set, {runs} run(s) a cell, SmolLM2-135M-Instruct in bf16 on CPU.

- *held*: seconds from process start to exit; on a GPU this is what is paid for.
- *engine*: seconds from the engine's first step to its last; *steps* and *tokens computed* are counted
  inside each peer's own vLLM by the same plugin (`benchmarks/peers/meter`).
- *first row safe*: seconds until an answer could be read from disk.
"""

_FOOT = """
## What this does not show

- Accepted rows of Ray Data LLM and Daft may include answers that were cut off: they do not hand over the
  finish reason.
- Our split and reconcile run where no accelerator is held; they are not in *held*.
- Identical prompts are sent once by us (`sharding.dedup`); the peers answer each.
"""


def write_document(
    path: Path, rows: int, runs: int, tables: list[tuple[str, dict[str, Measured]]], kills: dict[str, float]
) -> None:
    """Write the Markdown document, and a picture of the first table beside it."""
    text = _HEAD.format(
        when=f"{datetime.now(UTC):%Y-%m-%d}", machine=f"{platform.machine()}, CPU", rows=rows, runs=runs
    )
    picture = path.with_suffix(".svg")
    if tables:
        picture.write_text(_bars(*tables[0]), encoding="utf-8")
        text += f"\n![accepted rows per held second, {tables[0][0]}]({picture.name})\n"
    for title, measured in tables:
        text += f"\n## {title[0].upper()}{title[1:]}\n\n{_table(rows, measured)}"
    if kills:
        text += "\n## Killed at half (SIGKILL), started again\n\n"
        text += "Tokens computed in all, over those of an undisturbed run of the same peer.\n\n"
        text += "| who | tokens paid |\n|---|--:|\n"
        text += "".join(f"| {NAMES[p]} | {ratio:.2f} |\n" for p, ratio in kills.items())
    path.write_text(text + _FOOT, encoding="utf-8")


def _rate(m: Measured) -> float:
    return m.accepted / m.held if m.held else 0.0


def _table(rows: int, measured: dict[str, Measured]) -> str:
    ours = measured.get("ours")
    heads = ["who", "accepted", "held s", "rows / held s", "ours over it"]
    heads += ["engine s", "steps", "tokens computed", "first row safe"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for peer, m in measured.items():
        ratio = f"{_rate(ours) / _rate(m):.2f}" if ours and _rate(m) else "–"
        first = "at exit" if m.first_durable is None else f"{m.first_durable:.0f} s"
        lines.append(
            f"| {NAMES[peer]} | {m.accepted}/{rows} | {m.held:.1f} | {_rate(m):.2f} | {ratio} | "
            f"{m.engine:.1f} | {m.steps:.0f} | {m.tokens:.0f} | {first} |"
        )
    return "\n".join(lines) + "\n"


def _bars(title: str, measured: dict[str, Measured]) -> str:
    """A plain bar chart as SVG."""
    top = max((_rate(m) for m in measured.values()), default=1.0) or 1.0
    height = 28 * len(measured) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">Accepted rows per held second: {title}</text>',
    ]
    for index, (peer, m) in enumerate(measured.items()):
        y = 34 + 28 * index
        width = 420 * _rate(m) / top
        colour = "#2563eb" if peer == "ours" else "#94a3b8"
        parts.append(f'<text x="8" y="{y + 14}">{NAMES[peer].replace("`", "")}</text>')
        parts.append(f'<rect x="270" y="{y}" width="{width:.0f}" height="19" fill="{colour}"/>')
        parts.append(f'<text x="{276 + width:.0f}" y="{y + 14}">{_rate(m):.2f}</text>')
    return "\n".join([*parts, "</svg>\n"])
