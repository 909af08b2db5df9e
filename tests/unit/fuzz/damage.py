"""Damaged bytes, as hypothesis draws them: cut, flipped, stuffed with what upsets parsers, or noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_USUAL_EXAMPLES = 100
"""Hypothesis's own number, and the repeatable profile's."""

NASTY = (
    *(b"\x00", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\x1f\x8b"),
    *(b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\t", b"- ", b"&a [*a]", b"!!set {a}"),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 40, b"9" * 5000, b"-1", b"null", b"true", b'"\\ud800"', b"0x1F"),
    *(b"[" * 3000, b'{"a":' * 3000, b"x" * 100_000),
)
"""Pieces that text parsers trip over: marks, controls, half characters, brackets, numbers, depth, length."""


def fuzzed(examples: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Settings: so many examples, or more in a profile that draws more, and no health checks."""
    in_profile = examples * settings.default.max_examples // _USUAL_EXAMPLES
    return settings(max_examples=in_profile, suppress_health_check=list(HealthCheck))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with one to three injuries; now and then noise in its place."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["cut", "flip", "stuff", "drop", "repeat", "replace"])):
            case "cut":
                data = data[:at]
            case "flip" if data:
                flipped = data[at] ^ (1 << draw(st.integers(0, 7)))
                data = data[:at] + bytes([flipped]) + data[at + 1 :]
            case "stuff":
                data = data[:at] + draw(st.sampled_from(NASTY)) + data[at:]
            case "drop":
                data = data[:at] + data[at + draw(st.integers(1, 50)) :]
            case "repeat":
                data = data[:at] + data[max(0, at - draw(st.integers(1, 50))) :]
            case "replace":
                data = data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at + 8 :]
    return data


@st.composite
def flipped(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with one bit flipped."""
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
