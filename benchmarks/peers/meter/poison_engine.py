"""A vLLM plugin that makes one prompt deadly: the engine's process dies of SIGSEGV in the step that takes it.

Stands for the prompts that trip a fault in a kernel or run a device out of memory, which a CPU cannot show.
With ENGINE_POISON set to token ids, separated by commas, a prompt that holds any of them is one.
"""

from __future__ import annotations

import os
import signal
from typing import Any


def install() -> None:
    """Wrap the scheduler: a request is computed in the step that it comes out of there."""
    named = os.environ.get("ENGINE_POISON")
    if not named:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler, "poisoned", False):
        return
    deadly = {int(token) for token in named.split(",")}
    inner = Scheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        if any(deadly.intersection(new.prompt_token_ids or ()) for new in output.scheduled_new_reqs):
            os.kill(os.getpid(), signal.SIGSEGV)
        return output

    Scheduler.schedule = schedule
    Scheduler.poisoned = True
