"""A vLLM plugin that answers at once: what is left of a job is what stands around the engine.

With ENGINE_INSTANT set, the model is loaded but never run: each request gets the same token for as long
as it asks for one. Scheduler, tokenizer and all of a peer's own code run as ever.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

_TOKEN = 64
"""Any token that is a visible letter."""


def install() -> None:
    """Replace the model's execution; an engine core loads plugins while it makes its executor."""
    if not os.environ.get("ENGINE_INSTANT"):
        return
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    instant = _Instant()  # an engine core has one executor
    for executor in (MultiprocExecutor, UniProcExecutor):
        executor.execute_model = lambda _, *given, **named: instant.execute_model(*given, **named)


class _Instant:
    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        """A token for each request whose prompt is computed; what the scheduler takes for the model's."""
        from vllm.v1.outputs import ModelRunnerOutput

        for request in scheduled.finished_req_ids:
            self._prompt_tokens.pop(request, None)
        known: dict[str, tuple[int, int]] = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            known[new.req_id] = (new.num_computed_tokens, 0)
        old = scheduled.scheduled_cached_reqs
        known |= zip(old.req_ids, zip(old.num_computed_tokens, old.num_output_tokens))  # noqa: B905
        sampled = []
        for request, tokens in scheduled.num_scheduled_tokens.items():
            computed, made = known[request]
            complete = computed + tokens >= self._prompt_tokens[request] + made
            sampled.append([_TOKEN] if complete else [])
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future
