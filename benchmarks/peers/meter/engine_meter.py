"""A vLLM plugin that counts what an engine computes, the same way for every peer.

vLLM loads plugins of the group `vllm.general_plugins` in all of its processes. With this folder on
PYTHONPATH and ENGINE_METER set to a folder, each engine core keeps a 32-byte file there, one double
each: engine steps, tokens computed (prompt tokens that the prefix cache did not have, recomputed ones
again, and output tokens), and the times of the first and the last step (`time.time`). It is a memory
map: a reader sees it at any moment, and a SIGKILL loses nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

_FORMAT = "4d"


class Reading(NamedTuple):
    """The sum over all engine cores of one folder."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    """From the first step to the last, summed over engine cores."""
    first: float = 0.0


def read(folder: Path) -> Reading:
    """What the engines that wrote to `folder` have computed so far."""
    rows = [
        struct.unpack(_FORMAT, data)
        for data in (p.read_bytes() for p in folder.glob("*.meter"))
        if len(data) == struct.calcsize(_FORMAT)
    ]
    rows = [r for r in rows if r[0]]
    return Reading(
        steps=sum(r[0] for r in rows),
        tokens=sum(r[1] for r in rows),
        seconds=sum(r[3] - r[2] for r in rows),
        first=min((r[2] for r in rows), default=0.0),
    )


def install() -> None:
    """Wrap the scheduler, which decides in each step how many tokens the engine computes."""
    folder = os.environ.get("ENGINE_METER")
    if not folder:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler.schedule, "metered", False):
        return
    inner = Scheduler.schedule
    state: dict[str, Any] = {"steps": 0, "tokens": 0, "first": 0.0}

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            now = time.time()
            if "map" not in state:
                path = Path(folder) / f"{os.getpid()}.meter"
                path.write_bytes(bytes(struct.calcsize(_FORMAT)))
                with path.open("r+b") as file:
                    state["map"] = mmap.mmap(file.fileno(), 0)
                state["first"] = now
            state["steps"] += 1
            state["tokens"] += output.total_num_scheduled_tokens
            struct.pack_into(_FORMAT, state["map"], 0, state["steps"], state["tokens"], state["first"], now)
        return output

    schedule.metered = True  # type: ignore[attr-defined]
    Scheduler.schedule = schedule
