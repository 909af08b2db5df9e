"""Inline SVG for the report. Colours are CSS classes, so that light and dark pages both work.

Every function returns markup that is safe to insert; all text that comes from data is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from airflow_batchinfer.pipeline.histogram import EDGES, Histogram
from airflow_batchinfer.pipeline.report.model import Stage
from airflow_batchinfer.pipeline.words import duration

_WIDTH = 700
_HALF = 480
_MOST_BARS = 32

MOST_LABELS = 40
"""Rows and columns of a confusion matrix: cells are their square, and a thousand labels have a million."""


def stacked_bar(parts: Mapping[str, int]) -> Markup:
    """One bar of the whole width, a segment each (its key is its CSS class), with titles to hover."""
    total = sum(parts.values()) or 1
    x, segments = 0.0, []
    for name, count in parts.items():
        width = _WIDTH * count / total
        if count:
            width = max(width, 2.0)  # a single bad row in a million is still to be seen
        segments.append(
            Markup(
                '<rect class="c-{}" x="{:.2f}" y="0" width="{:.2f}" height="22"><title>{}</title></rect>'
            ).format(name, x, width, f"{name}: {count:,} rows")
        )
        x += width
    return _svg(max(x, _WIDTH), 22, segments, "Rows by outcome", stretch=True)


def histogram(values: Histogram, unit: str) -> Markup:
    """Bars over buckets that widen with the value; the axis names a few of them."""
    if not values.count:
        return Markup("<p class=none>No values.</p>")
    bars = _merge_buckets(values)
    height, base = 124, 100
    top = max(count for _, _, count in bars)
    step = _HALF / len(bars)
    marks = []
    for i, (low, high, count) in enumerate(bars):
        tall = base * count / top
        if count:
            tall = max(tall, 1.5)
        label = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        marks.append(
            Markup(
                '<rect class="bar" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}">'
                "<title>{}</title></rect>"
            ).format(i * step + 1, base - tall, step - 2, tall, f"{label} {unit}: {count:,} rows")
        )
    for i in sorted({0, len(bars) // 4, len(bars) // 2, 3 * len(bars) // 4, len(bars) - 1}):
        anchor = "start" if i == 0 else "end" if i == len(bars) - 1 else "middle"
        at = i * step if i == 0 else _HALF if i == len(bars) - 1 else (i + 0.5) * step
        text = bars[i][1] if i == len(bars) - 1 else bars[i][0]
        marks.append(
            Markup('<text x="{:.1f}" y="118" text-anchor="{}">{}</text>').format(at, anchor, f"{text:,}")
        )
    marks.append(Markup('<line class="axis" x1="0" x2="{}" y1="100.5" y2="100.5"/>').format(_HALF))
    return _svg(_HALF, height, marks, f"Histogram of {unit}")


def timeline(stages: Sequence[Stage]) -> Markup:
    """Stages one below the other, against the time since the plan was written."""
    end = max((s.end for s in stages), default=0.0) or 1.0
    row, left = 22, 150
    marks = []
    for i, stage in enumerate(stages):
        x = left + (_WIDTH - left - 90) * stage.start / end
        width = max(1.5, (_WIDTH - left - 90) * (stage.end - stage.start) / end)
        y = i * row
        marks.append(Markup('<text x="0" y="{}">{}</text>').format(y + 15, stage.name))
        marks.append(
            Markup('<rect class="bar" x="{:.2f}" y="{}" width="{:.2f}" height="14"/>').format(x, y + 4, width)
        )
        marks.append(
            Markup('<text class="num" x="{:.2f}" y="{}">{}</text>').format(
                x + width + 6, y + 15, duration(stage.end - stage.start)
            )
        )
    return _svg(_WIDTH, row * max(1, len(stages)), marks, "Time by stage")


def confusion(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> Markup:
    """True labels down, answers across; a cell is darker the larger its share of the true label.

    Of more than `MOST_LABELS` it shows those that were most often mistaken.
    """
    shown = _most_mistaken(matrix, MOST_LABELS)
    cell = 46 if len(shown) <= 12 else 28
    left, top = 150, 110
    marks = [
        Markup('<text x="{}" y="12" class="dim">answered</text>').format(left),
        Markup('<text x="0" y="{}" class="dim">true label</text>').format(top - 8),
    ]
    for j, label in enumerate(shown):
        x = left + j * cell + cell / 2
        marks.append(
            Markup('<text transform="translate({:.1f} {}) rotate(-40)">{}</text>').format(
                x, top - 8, _short(labels[label], 18)
            )
        )
    for i, true in enumerate(shown):
        total = sum(matrix[true]) or 1
        y = top + i * cell
        marks.append(
            Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                left - 8, y + cell / 2 + 4, _short(labels[true], 20)
            )
        )
        for j, answer in enumerate(shown):
            count = matrix[true][answer]
            share = count / total
            kind = "good" if i == j else "bad"
            marks.append(
                Markup(
                    '<rect class="cell-{}" x="{}" y="{}" width="{}" height="{}" fill-opacity="{:.3f}">'
                    "<title>{}</title></rect>"
                ).format(
                    kind,
                    left + j * cell,
                    y,
                    cell - 2,
                    cell - 2,
                    0.06 + 0.94 * share if count else 0.04,
                    f"true {labels[true]}, answered {labels[answer]}: {count:,} ({share:.0%})",
                )
            )
            if count:
                marks.append(
                    Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
                        "on-dark" if share > 0.5 else "on-light",
                        left + j * cell + cell / 2 - 1,
                        y + cell / 2 + 4,
                        f"{count:,}",
                    )
                )
    side = len(shown) * cell
    return _svg(left + side + 60, top + side, marks, "Confusion matrix")


def _most_mistaken(matrix: Sequence[Sequence[int]], most: int) -> list[int]:
    """Indices of the labels with the most rows that were wrongly theirs or wrongly not, in order."""
    mistakes = [
        sum(line) + given - 2 * line[i]
        for i, (line, given) in enumerate(zip(matrix, map(sum, zip(*matrix, strict=True)), strict=True))
    ]
    return sorted(sorted(range(len(matrix)), key=lambda i: -mistakes[i])[:most])


def _merge_buckets(values: Histogram) -> list[tuple[int, int, int]]:
    """Bars as (lowest value, highest value, count): neighbouring buckets joined until few are left."""
    assert values.minimum is not None
    assert values.maximum is not None
    edges = [int(e) for e in EDGES]
    inside = [
        (low, high - 1)
        for low, high in zip(edges, [*edges[1:], edges[-1] + 1], strict=True)
        if high > values.minimum and low <= values.maximum
    ]
    group = -(-len(inside) // _MOST_BARS)
    bars = []
    for i in range(0, len(inside), group):
        chunk = inside[i : i + group]
        bars.append((chunk[0][0], chunk[-1][1], sum(values.buckets.get(low, 0) for low, _ in chunk)))
    return bars


def _svg(width: float, height: float, marks: Sequence[Markup], title: str, stretch: bool = False) -> Markup:
    fit = Markup(' preserveAspectRatio="none" class="stretch"') if stretch else Markup("")
    return Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}"{}>{}</svg>').format(
        width, height, title, fit, Markup("").join(marks)
    )


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
