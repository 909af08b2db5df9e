"""Amounts as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds in words: `0.4 s`, `42 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(value: float) -> str:
    """`12,345`, `12.3`, `0.012`: as many digits as are worth reading."""
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def tokens(value: float) -> str:
    """A number of tokens: whole, as they come."""
    return f"{value:,.0f}"


def share(part: float, whole: float) -> str:
    """`12.3%`; a share that is not nothing never reads `0.0%`."""
    if not whole or not part:
        return "0%"
    percent = 100 * part / whole
    return f"{percent:.1f}%" if percent >= 0.1 else "< 0.1%"
