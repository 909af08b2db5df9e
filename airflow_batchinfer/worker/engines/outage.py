"""How long a server has been out of reach, told from the connections that fail."""

from __future__ import annotations

import time

_APART_SECONDS = 5.0
"""While a server is away the next attempt follows within a second or two. After so long without one that
failed, others were connected, or nobody asked: an attempt that fails then begins another outage."""


class Outage:
    """Failures to connect that follow each other closely. Begin with none."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0

    def goes_on(self, started: float) -> float:
        """Take in a failure to connect; returns the seconds for which the server has been out of reach.

        Args:
            started: when the attempt began (monotonic).
        """
        if self._began is None or started - self._last > _APART_SECONDS:
            self._began = started
        self._last = time.monotonic()
        return self._last - self._began

    def is_over(self) -> None:
        """Take in an answer."""
        self._began = None
