"""What is measured: each round is one table of the document."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.peers import prompt_sets
from benchmarks.peers.job import Job

OURS = "ours"
EVERYBODY = (
    "ours",
    "run_batch",
    "llm_chat",
    "llm_chat_chunks",
    "ray_data",
    "datatrove_runner",
    "daft_prompt",
)
"""Modules of this package, each one peer."""
SLOWEST = "single_calls"
"""One more, measured in one round only."""

SYSTEM = "You are a careful support assistant. Answer in one short sentence, in plain English."
TEMPLATE = "Summarise this ticket in one sentence.\n\n{text}"

NEEDED: dict[str, object] = {"max_model_len": 2048}
"""What the model needs; all that a defaults run gives."""
EQUAL = NEEDED | {
    "enforce_eager": True,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 4 << 30,
}
"""The same arguments for everybody."""
TIGHT = EQUAL | {"num_gpu_blocks_override": 48}
"""Equal arguments with a KV cache that holds only some of the running prompts' prefixes."""


ALL_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
"""Goes with equal arguments: on a CPU vLLM keeps one core free of the model for its own processes."""


@dataclass(frozen=True)
class Round:
    """One table of the document: a prompt set under one set of engine arguments.

    Attributes:
        rate: what is compared, accepted rows per second `held` (process start to exit) or per second of the
            `engine` (its first step to its last).
        instant: the engine answers at once, so that only what stands around it is measured.
        wanted: the ratio to reach, ours over a peer's; `best` stands for the best of all peers.
    """

    name: str
    title: str
    prompts: str
    engine: dict[str, object]
    peers: tuple[str, ...] = EVERYBODY
    rate: Literal["held", "engine"] = "held"
    wanted: dict[str, float] = field(default_factory=dict)
    instant: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the peer's process."""
        if self.engine is NEEDED:
            return {}
        return ALL_CORES | ({"ENGINE_INSTANT": "1"} if self.instant else {})


_FEW = (OURS, "run_batch", "llm_chat", "ray_data")

ROUNDS = (
    Round(
        "defaults",
        "mixed, everyone's defaults",
        "mixed",
        NEEDED,
        wanted={"run_batch": 1.5, "ray_data": 1.5, "llm_chat_chunks": 1.0, "best": 1.3},
    ),
    Round(
        "equal",
        "mixed, equal arguments",
        "mixed",
        EQUAL,
        peers=(*EVERYBODY, SLOWEST),
        wanted={"run_batch": 1.0, "llm_chat_chunks": 1.0},
    ),
    Round(
        "uniform",
        "uniform, equal arguments",
        "uniform",
        EQUAL,
        peers=(OURS, "llm_chat"),
        rate="engine",
        wanted={"llm_chat": 0.97},
    ),
    Round(
        "prefixes",
        "shared prefixes, equal arguments, tight KV cache",
        "documents",
        TIGHT,
        peers=(OURS, "llm_chat"),
        rate="engine",
        wanted={"llm_chat": 1.3},
    ),
    Round("long-tailed", "long-tailed, equal arguments", "long-tailed", EQUAL, peers=_FEW),
    Round("duplicates", "30 % duplicates, equal arguments", "duplicates", EQUAL, peers=_FEW),
)

KILLED = "equal"
"""The round that is run again with more rows, whole and killed at half of its tokens."""

FAULTS = {
    "over-long": "one prompt longer than the context",
    "malformed": "one line of the input is no JSON",
    "deadly": "one prompt kills the engine (SIGSEGV)",
}
"""Prompt sets with one fault, and what it is."""

MEMORY_ROWS = (1_000, 100_000)
"""Rows of the two runs whose peaks are compared; the engine answers at once."""
MEMORY = Round(
    "memory",
    "peak memory, instant engine",
    "uniform",
    NEEDED | {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30},
    instant=True,
)


def write_job(
    folder: Path,
    prompts: str,
    rows: int,
    *,
    engine: dict[str, object],
    model: str,
    max_tokens: int,
    checkpoint_rows: int = 0,
) -> Job:
    """Write the prompts and the job that any peer is given, into a folder that exists.

    Args:
        prompts: name of a prompt set. model: folder of the model. max_tokens: of an answer, at most.
        checkpoint_rows: see `Job`.
    """
    prompt_sets.write(prompts, rows, folder / "prompts.jsonl")
    job = Job(
        prompts=str(folder / "prompts.jsonl"),
        out=str(folder),
        model=str(Path(model).resolve()),
        system=SYSTEM,
        template=TEMPLATE,
        engine=dict(engine),
        max_tokens=max_tokens,
        checkpoint_rows=checkpoint_rows,
    )
    job.save(folder / "job.json")
    return job


def memory_round(rows: int) -> str:
    """What a run of so many rows is called on record."""
    return f"memory-{rows}"
