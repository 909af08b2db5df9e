"""Drives vLLM's `LLMEngine` step by step: a row comes back when it is finished, alone.

vLLM's own `LLM.generate` adds all prompts, waits for all, and one that it refuses ends the call for
all. The engine below it has none of these limits, and this is the loop `LLM` runs, without them.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm import LLMEngine, PoolingParams, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import ChoiceTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.worker.engines.base import FINISHED
from airflow_batchinfer.worker.engines.vllm_options import engine_config
from airflow_batchinfer.worker.engines.vllm_parameters import Parameters

Result = tuple[Any, ...]
"""A `Completion`'s fields, or `(key, "failure", reason, message, transient)`: plain, so cheap to send."""

_IN_FLIGHT_BATCHES = 2
"""Requests to keep in the engine, in batches of `max_num_seqs`: as fast as handing it everything."""


class VllmDriver:
    """One vLLM engine for one job."""

    def __init__(self, spec: JobSpec) -> None:
        """Work out vLLM's configuration and let it check the job; no accelerator is touched.

        Raises:
            SpecError: an option, the model or the schema is not what vLLM can work with.
        """
        self._task = spec.task
        self._seed = spec.sampling.seed
        self._config = engine_config(spec)
        self._parameters = Parameters(spec)
        self._check_parameters()
        self._adapter = (
            LoRARequest(lora_name="adapter", lora_int_id=1, lora_path=spec.model.adapter)
            if spec.model.adapter
            else None
        )
        self.counters = {"steps": 0, "prefilled_tokens": 0, "cached_tokens": 0, "made_tokens": 0}
        """Totals since the start: engine steps with output, prompt tokens computed, taken from the
        prefix cache, and tokens made."""

    def start(self) -> None:
        """Load the model and run one short request, so that every grammar is compiled before the first row.

        Raises:
            SpecError: the grammar does not compile.
        """
        self._engine = LLMEngine.from_vllm_config(
            self._config, UsageContext.LLM_CLASS, disable_log_stats=True
        )
        self._count_outputs()
        self._warm_up()

    @property
    def busy(self) -> bool:
        """Whether requests are in the engine."""
        return bool(self._engine.has_unfinished_requests())

    @property
    def tokens_made(self) -> int:
        """Moves whenever the engine makes progress."""
        return self.counters["made_tokens"] + self.counters["prefilled_tokens"] + self.counters["steps"]

    def info(self) -> dict[str, Any]:
        """The fields of `EngineInfo`."""
        scheduler, model, cache = (
            self._config.scheduler_config,
            self._config.model_config,
            self._config.cache_config,
        )
        options = {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "num_gpu_blocks": cache.num_gpu_blocks,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "tensor_parallel_size": self._config.parallel_config.tensor_parallel_size,
            "pipeline_parallel_size": self._config.parallel_config.pipeline_parallel_size,
        }
        return {
            "name": "vllm",
            "version": vllm.__version__,
            "max_in_flight": _IN_FLIGHT_BATCHES * scheduler.max_num_seqs,
            "max_model_len": model.max_model_len,
            "options": {name: str(value) for name, value in options.items()},
            "greedy": self._parameters.greedy,
        }

    def add(self, key: str, seed: int, token_ids: list[int]) -> Result | None:
        """Queue one request; returns its failure if vLLM refuses it."""
        return self._add(key, token_ids, self._parameters.of_seed(seed))

    def _add(
        self, key: str, token_ids: list[int], parameters: SamplingParams | PoolingParams
    ) -> Result | None:
        try:
            self._engine.add_request(key, tokens_input(token_ids), parameters, lora_request=self._adapter)
        except (VLLMClientError, ValueError, TypeError) as error:
            too_long = len(token_ids) >= self._config.model_config.max_model_len
            reason = Reason.OVER_LONG if too_long else Reason.ENGINE_REFUSED
            return (key, "failure", reason.value, f"vLLM refused the request: {str(error).strip()}", False)
        return None

    def abort(self, keys: list[str]) -> None:
        """Forget requests."""
        self._engine.abort_request(keys)

    def step(self) -> list[Result]:
        """Wait for the engine's next step and return what it finished."""
        return [self._result(output) for output in self._engine.step() if output.finished]

    def _result(self, output: RequestOutput | PoolingRequestOutput[Any]) -> Result:
        prompt_tokens = len(output.prompt_token_ids or ())
        if isinstance(output, PoolingRequestOutput):
            vector = output.outputs.data.float().flatten().tolist()
            return (output.request_id, None, vector, "stop", prompt_tokens, 0, output.num_cached_tokens or 0)
        answer = output.outputs[0]
        if answer.finish_reason not in FINISHED:
            return self._unfinished(output.request_id, answer.finish_reason)
        return (
            output.request_id,
            answer.text,
            None,
            answer.finish_reason,
            prompt_tokens,
            len(answer.token_ids),
            output.num_cached_tokens or 0,
        )

    def _unfinished(self, key: str, finish_reason: str | None) -> Result:
        structured = isinstance(self._task, (ChoiceTask, JsonTask, RegexTask))
        if finish_reason == "error" and structured:
            return (key, "failure", Reason.GRAMMAR_REJECTED.value, "vLLM could not apply the grammar", True)
        message = f"vLLM ended the request with finish_reason `{finish_reason}`"
        return (key, "failure", Reason.ENGINE_ERROR.value, message, True)

    def _check_parameters(self) -> None:
        """Let vLLM look at the job's parameters and grammar before the model is loaded, as it costs less.

        Raises:
            SpecError: it refuses them.
        """
        parameters = self._parameters.of_seed(self._seed)
        if isinstance(parameters, PoolingParams):
            return
        config = self._config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        try:
            parameters.verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
            )
        except (VLLMClientError, ValueError) as error:
            raise SpecError(f"{self._blame()}: vLLM refuses it: {str(error).strip()}") from error

    def _warm_up(self) -> None:
        """Make one token with the job's own parameters, so that the grammar is compiled.

        Raises:
            SpecError: that fails.
        """
        parameters = self._parameters.of_seed(self._seed).clone()
        if isinstance(parameters, SamplingParams):
            parameters.max_tokens = 1
        failure = self._add("warm-up", [self._some_token()], parameters)
        results = [] if failure is None else [failure]
        while not results:
            results = self.step()
        if results[0][1] == "failure":
            raise SpecError(f"{self._blame()}: {results[0][3]}")
        for name in self.counters:
            self.counters[name] = 0

    def _blame(self) -> str:
        fields = {"choice": "task.labels", "json": "task.schema", "regex": "task.pattern"}
        return fields.get(self._task.type, "sampling")

    def _some_token(self) -> int:
        tokenizer = self._engine.renderer.get_tokenizer()
        return int(tokenizer.encode("a", add_special_tokens=False)[0])

    def _count_outputs(self) -> None:
        """Count what comes from the engine core; vLLM's own statistics cost several times as much."""
        core, counters = self._engine.engine_core, self.counters
        get_output = core.get_output

        def counted() -> Any:
            outputs = get_output()
            counters["steps"] += 1
            for output in outputs.outputs:
                counters["made_tokens"] += len(output.new_token_ids)
                if output.prefill_stats is not None:
                    counters["prefilled_tokens"] += output.prefill_stats.num_computed_tokens
                    counters["cached_tokens"] += output.prefill_stats.num_cached_tokens
            return outputs

        core.get_output = counted
