"""One line of text that is rewritten in place; where there is no terminal, a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

_SECONDS_BETWEEN_LINES = 10.0


class LiveLine:
    """Shows a changing text on stdout. Use as a context manager: at the end the last text stays."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = ""
        self._next = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._shown:
            print(flush=True)

    def show(self, text: str) -> None:
        """Show `text` with the time since the start; without a terminal, if it is new and some time on."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._shown = f"[{self._clock()}] {text}"
            print(f"\r\x1b[K{self._shown[:width]}", end="", flush=True)
        elif text != self._shown and time.monotonic() >= self._next:
            self._shown = text
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(f"[{self._clock()}] {text}", flush=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02d}"
