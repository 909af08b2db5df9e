"""Peer: `vllm run-batch`, OpenAI's batch file in and out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.peers.job import Job, Results, read_jsonl


def main(job: Job) -> None:
    """Write the batch file, then become `run-batch` (as a module: the CPU build has no `vllm` command)."""
    batch = job.folder / "batch.jsonl"
    with batch.open("w", encoding="utf-8") as file:
        for line in job.lines():
            file.write(_request(job, line) + "\n")
    flags = []
    for name, value in job.engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    module = "vllm.entrypoints.openai.run_batch"
    files = ["-i", str(batch), "-o", str(job.folder / "results.jsonl")]
    os.execv(sys.executable, [sys.executable, "-m", module, *files, "--model", job.model, *flags])


def _request(job: Job, line: str) -> str:
    """A line of the batch file; what is no JSON stays as it is, so that `run-batch` meets it."""
    try:
        row_id, messages = job.row(line)
    except json.JSONDecodeError:
        return line.rstrip("\n")
    body = {"model": job.model, "messages": messages, "max_tokens": job.max_tokens, "temperature": 0.0}
    return json.dumps(
        {"custom_id": str(row_id), "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


def results(folder: Path) -> Results:
    """Answers of the batch's output file that ended well."""
    found: Results = {}
    for line in read_jsonl(folder / "results.jsonl"):
        choices = ((line.get("response") or {}).get("body") or {}).get("choices") or []
        if choices and choices[0]["finish_reason"] in ("stop", "length"):
            found[int(line["custom_id"])] = choices[0]["message"]["content"]
    return found


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
