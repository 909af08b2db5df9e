"""Which tokens make a prompt deadly to an engine with the plugin `meter/poison_engine.py`."""

from __future__ import annotations

import json

from benchmarks.peers.job import Job
from benchmarks.peers.prompt_sets import DEADLY


def poison_of(job: Job) -> dict[str, str]:
    """Environment variables for the engine: tokens that only the deadly row of the prompts has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    texts = [json.loads(line)["text"] for line in job.lines()]
    harmless = [job.system, job.template, *(text for text in texts if DEADLY not in text)]
    others = {token for text in harmless for token in tokenizer.encode(text)}
    deadly = set(tokenizer.encode(f" {DEADLY}")) - others
    return {"ENGINE_POISON": ",".join(map(str, sorted(deadly)))}
