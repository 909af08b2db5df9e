"""Peer: one `LLM.chat` call over all prompts, in file order, results written when it returns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.peers.job import Job, Results, read_jsonl


def main(job: Job) -> None:
    """What a user writes first."""
    chat(job, chunk=None)


def chat(job: Job, chunk: int | None) -> None:
    """`LLM.chat` over chunks of `chunk` rows (all at once if none), each chunk written when done."""
    from vllm import LLM, SamplingParams

    llm = LLM(job.model, **job.engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    have = {r["id"] for r in read_jsonl(job.folder / "results.jsonl")}
    rows = [row for row in job.rows() if row[0] not in have]
    size = chunk or len(rows)
    with (job.folder / "results.jsonl").open("a", encoding="utf-8") as file:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            outputs = llm.chat([m for _, m in part], sampling, use_tqdm=False)
            for (row_id, _), output in zip(part, outputs, strict=True):
                answer = output.outputs[0]
                file.write(
                    json.dumps({"id": row_id, "text": answer.text, "finish": answer.finish_reason}) + "\n"
                )
            file.flush()


def results(folder: Path) -> Results:
    """Rows of `results.jsonl` that ended well."""
    return {
        r["id"]: r["text"]
        for r in read_jsonl(folder / "results.jsonl")
        if r.get("finish") in ("stop", "length") and r["text"]
    }


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
