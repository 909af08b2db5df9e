"""Peer: Ray Data LLM, its vLLM engine processor, one engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Results, read_jsonl


def main(job: Job) -> None:
    """Its documented batch pipeline; each block is written as JSONL when it is done.

    A checkpoint is asked for where a run is killed; it is made a block, so blocks are small then.
    """
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # vLLM's own default on a CPU, 92 % of all memory, is not there beside Ray's processes.
    engine = {"kv_cache_memory_bytes": 4 << 30, **job.engine}
    # A logical number: with fewer, its actors, one CPU each, wait for one another.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = vLLMEngineProcessorConfig(
        model_source=job.model,
        engine_kwargs=engine,
        concurrency=1,
        placement_group_config={"bundles": [{"CPU": 1}]},
        should_continue_on_error=True,
    )

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": job.template.format(text=row["text"])}]
        if job.system:
            messages.insert(0, {"role": "system", "content": job.system})
        return {
            "id": row["id"],
            "messages": messages,
            "sampling_params": {"temperature": 0.0, "max_tokens": job.max_tokens},
        }

    def postprocess(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": row["id"],
            "text": row.get("generated_text") or "",
            "error": row.get("__inference_error__") or "",
        }

    processor = build_processor(config, preprocess=preprocess, postprocess=postprocess)
    if job.checkpoint_rows:
        from ray.data.checkpoint import CheckpointConfig

        # Before the dataset is made, which keeps a copy of the context.
        ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
            id_column="id", checkpoint_path=str(job.folder / "checkpoint"), delete_checkpoint_on_success=False
        )
    dataset = ray.data.read_json(job.prompts)
    if job.checkpoint_rows:
        dataset = dataset.repartition(target_num_rows_per_block=job.checkpoint_rows)
    processor(dataset).write_json(str(job.folder / "results"))


def results(folder: Path) -> Results:
    """Rows without an error; Ray does not hand over the finish reason."""
    lines = (row for path in sorted((folder / "results").glob("*.json*")) for row in read_jsonl(path))
    return {int(r["id"]): r["text"] for r in lines if not _failed(r) and r["text"]}


def _failed(row: dict[str, Any]) -> bool:
    """A row that failed skips `postprocess`, and still has its input's columns, `text` among them."""
    return bool(row.get("error") or row.get("__inference_error__"))


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
