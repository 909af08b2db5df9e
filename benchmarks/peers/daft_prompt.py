"""Peer: Daft's `prompt` with its `vllm-prefix-caching` provider."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.job import Job, Results, read_jsonl


def main(job: Job) -> None:
    """Its documented form; it takes rendered text, so the chat template is applied before."""
    import daft
    from daft.functions import prompt
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    ids, texts = [], []
    for row_id, messages in job.rows():
        ids.append(row_id)
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    frame = daft.from_pydict({"id": ids, "prompt": texts})
    answer = prompt(
        daft.col("prompt"),
        provider="vllm-prefix-caching",
        model=job.model,
        gpus_per_actor=0,
        concurrency=1,
        engine_args=job.engine,
        generate_args={"sampling_params": SamplingParams(temperature=0.0, max_tokens=job.max_tokens)},
    )
    frame.select("id", answer.alias("text")).write_json(str(job.folder / "results"))


def results(folder: Path) -> Results:
    """Rows with a text; Daft does not hand over the finish reason."""
    lines = (row for path in sorted((folder / "results").rglob("*.json*")) for row in read_jsonl(path))
    return {int(r["id"]): r["text"] for r in lines if r.get("text")}


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
