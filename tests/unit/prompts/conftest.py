"""The small text model's own tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.prompts.jobs import MODELS


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODELS / "smollm2")
