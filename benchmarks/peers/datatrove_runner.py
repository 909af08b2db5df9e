"""Peer: datatrove's InferenceRunner with its own vLLM server and local checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Job, Results, read_jsonl


def main(job: Job) -> None:
    """Its documented local executor: one task, one server, checkpoints every 64 documents."""
    from datatrove.data import Document
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    # datatrove starts `vllm serve`, which lies beside this environment's Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    engine = dict(job.engine)
    context = int(engine.pop("max_model_len", 8192))

    async def rollout(document: Document, generate: Any) -> Any:
        messages = [{"role": "user", "content": job.template.format(text=document.text)}]
        if job.system:
            messages.insert(0, {"role": "system", "content": job.system})
        return await generate({"messages": messages, "max_tokens": job.max_tokens, "temperature": 0.0})

    config = InferenceConfig(
        server_type="vllm",
        model_name_or_path=job.model,
        model_max_context=context,
        model_kwargs={k.replace("_", "-"): v for k, v in engine.items()},
        server_start_timeout_sec=600.0,
    )
    prompts = Path(job.prompts)
    runner = InferenceRunner(
        rollout_fn=rollout,
        config=config,
        records_per_chunk=64,
        checkpoints_local_dir=str(job.folder / "checkpoints"),
        output_writer=JsonlWriter(
            str(job.folder / "results"),
            output_filename="${rank}_chunk_${chunk_index}.jsonl",
            compression=None,
        ),
    )
    reader = JsonlReader(str(prompts.parent), glob_pattern=prompts.name, text_key="text", id_key="id")
    LocalPipelineExecutor(
        pipeline=[reader, runner], logging_dir=str(job.folder / "logs"), tasks=1, workers=1
    ).run()


def results(folder: Path) -> Results:
    """Documents with an answer that ended well."""
    found: Results = {}
    for path in sorted((folder / "results").rglob("*.jsonl")):
        for line in read_jsonl(path):
            for rollout in line.get("metadata", {}).get("rollout_results", []):
                if rollout.get("finish_reason") in ("stop", "length"):
                    found[int(line["id"])] = rollout["text"]
    return found


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
