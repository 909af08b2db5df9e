"""How many requests a server gets at once: up slowly while it goes well, down by half when it does not."""

from __future__ import annotations

import asyncio
import time


class AdaptiveLimit:
    """A semaphore whose size follows the server (additive increase, multiplicative decrease).

    It begins by growing with each success, which doubles it in every round, until the first trouble;
    from then on it grows by one a round. Used within one event loop.
    """

    def __init__(self, *, first: int, most: int) -> None:
        """Begin with `first` at once, and never exceed `most`."""
        self._size = float(first)
        self._most = most
        self._taken = 0
        self._cautious = False
        self._lowered_at = self._succeeded_at = 0.0
        self._resume_at = 0.0
        self._changed = asyncio.Condition()

    @property
    def size(self) -> int:
        """Requests that may be open at once, now."""
        return max(1, int(self._size))

    @property
    def paused(self) -> bool:
        """Whether nothing is sent now; see `pause`."""
        return time.monotonic() < self._resume_at

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._taken < self.size)
            self._taken += 1
        while (wait := self._resume_at - time.monotonic()) > 0:
            try:
                await asyncio.sleep(wait)
            except asyncio.CancelledError:
                await self.__aexit__()
                raise

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._taken -= 1
            # Growth since the last turn may let in more than one.
            self._changed.notify_all()

    def went_well(self) -> None:
        """Grow a little."""
        self._succeeded_at = time.monotonic()
        step = 1.0 / self._size if self._cautious else 1.0
        self._size = min(self._size + step, float(self._most))

    def went_well_since(self, started: float) -> bool:
        """Whether a request has gone well since `started` (monotonic)."""
        return self._succeeded_at > started

    def went_badly(self, started: float) -> None:
        """Halve, once for all requests that were open (`started`, monotonic) when it was last halved."""
        self._cautious = True
        if started >= self._lowered_at:
            self._size = max(1.0, self._size / 2)
            self._lowered_at = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Send nothing for so long."""
        self._resume_at = max(self._resume_at, time.monotonic() + seconds)
