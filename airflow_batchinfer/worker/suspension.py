"""Whether this process has been suspended, alone or with its machine.

Told by a thread that only ticks: whatever else a worker does may take its time with nothing being wrong.
"""

from __future__ import annotations

import threading
import time

_TICK_SECONDS = 0.25
_GAP_SECONDS = 1.0
"""Where ticks lie further apart, the process may have been suspended in between."""


class Suspensions:
    """Watches for suspensions until it is closed."""

    def __init__(self) -> None:
        """Set up; `start` begins."""
        self._over_at = self._ticked_at = boot_seconds()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="suspensions", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    @property
    def over_at(self) -> float:
        """When the last one was over, in `boot_seconds`; now, if there may be one that is not seen yet."""
        ticked_at = self._ticked_at
        now = boot_seconds()  # after the tick, so that a suspension between the two shows
        return now if now - ticked_at > _GAP_SECONDS else self._over_at

    def tick(self) -> None:
        """See whether the last tick is long ago."""
        now = boot_seconds()
        if now - self._ticked_at > _GAP_SECONDS:
            self._over_at = now
        self._ticked_at = now

    def _run(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            self.tick()


def boot_seconds() -> float:
    """Seconds on a clock that runs on while process or machine are suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
