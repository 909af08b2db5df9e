"""Jobs and requests for tests of real engines on the small models."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow_batchinfer.prompts.builder import Prepared, PromptBuilder
from airflow_batchinfer.prompts.tokens import load_tokenizer
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.base import Completion, Engine, Request, RequestFailure

MODELS = Path(__file__).resolve().parents[2] / ".build" / "models"
PATIENCE_SECONDS = 120.0

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}


def job(model: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    """A job on SmolLM2 in vLLM; `fields` replace parts of the spec."""
    spec: dict[str, Any] = {
        "name": "test",
        "input": {"path": "rows.jsonl"},
        "prompt": {"template": "{{ text }}"},
        "model": model or {"name": str(MODELS / "smollm2"), "engine": ENGINE},
        "sampling": {"max_tokens": 24},
        "store": "store",
    }
    return JobSpec.parse(spec | fields)


def random_adapter(folder: Path, rank: int = 8) -> str:
    """Write a LoRA adapter for SmolLM2 with random weights, as PEFT would; returns the folder."""
    import numpy as np
    from safetensors.numpy import save_file

    model = json.loads((MODELS / "smollm2" / "config.json").read_text(encoding="utf-8"))
    hidden = model["hidden_size"]
    widths = {"q_proj": hidden, "v_proj": model["num_key_value_heads"] * model["head_dim"]}
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in widths.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (rank, hidden), "lora_B": (width, rank)}
            tensors |= {
                f"{key}.{half}.weight": random.normal(0, 0.1, shape).astype(np.float32)
                for half, shape in shapes.items()
            }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
    }
    config |= {"target_modules": sorted(widths), "base_model_name_or_path": "smollm2"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def requests(spec: JobSpec, texts: Sequence[str], *, takes_tokens: bool = True) -> list[Request]:
    """One request a text, keyed by its position, as the worker would make them."""
    tokenizer = load_tokenizer(spec) if takes_tokens else None
    builder = PromptBuilder(spec, tokenizer, 100_000 if takes_tokens else None, takes_tokens=takes_tokens)
    made = []
    for i, prepared in enumerate(builder.build([{"text": text} for text in texts])):
        assert isinstance(prepared, Prepared)
        (prompt,) = prepared.prompts
        made.append(
            Request(str(i), 0, token_ids=prompt.token_ids, messages=prompt.messages, text=prompt.text)
        )
    return made


def collect(engine: Engine, count: int) -> dict[str, Completion | RequestFailure]:
    """Poll until `count` answers are there."""
    answers: dict[str, Completion | RequestFailure] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(answers) < count:
        assert time.monotonic() < deadline, f"{len(answers)} of {count} answers"
        for answer in engine.poll(1.0):
            assert answer.key not in answers, "each request comes back once"
            answers[answer.key] = answer
    return answers


def completed(answers: dict[str, Completion | RequestFailure]) -> dict[str, Completion]:
    """The answers, all of which must be results."""
    results = {}
    for key, answer in answers.items():
        assert isinstance(answer, Completion), answer
        assert answer.finish_reason in ("stop", "length")
        results[key] = answer
    return results
