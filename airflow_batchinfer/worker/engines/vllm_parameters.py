"""From a job's spec to the parameters of vLLM's requests."""

from __future__ import annotations

from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, RegexTask

_MOST_KEPT = 1024
"""Parameters kept for reuse; more are needed only by a job that gives each row its own seed."""


class Parameters:
    """vLLM's parameters for the requests of a job, one object a seed.

    Whatever is set here that decides an output is a field of the spec, so that the fingerprint covers it.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._task = spec.task
        self._sampling = spec.sampling
        self._made: dict[int, SamplingParams | PoolingParams] = {}

    def of_seed(self, seed: int) -> SamplingParams | PoolingParams:
        """The parameters; greedy decoding uses no seed, so all its rows share one object."""
        slot = 0 if self.greedy else seed
        if slot not in self._made:
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            self._made[slot] = self._make(None if self.greedy else seed)
        return self._made[slot]

    @property
    def greedy(self) -> bool:
        """Whether no seed decides anything."""
        return isinstance(self._task, EmbedTask) or self._sampling.temperature == 0.0

    def _make(self, seed: int | None) -> SamplingParams | PoolingParams:
        if isinstance(self._task, EmbedTask):
            return PoolingParams(task="embed", use_activation=self._task.normalize)
        sampling = self._sampling
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            stop=sampling.stop or None,
            seed=seed,
            structured_outputs=self._grammar(),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _grammar(self) -> StructuredOutputsParams | None:
        match self._task:
            case ChoiceTask(labels=labels):
                return StructuredOutputsParams(choice=list(labels))
            case JsonTask(json_schema=schema):
                return StructuredOutputsParams(json=schema)
            case RegexTask(pattern=pattern):
                return StructuredOutputsParams(regex=pattern)
            case _:
                return None
