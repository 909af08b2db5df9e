from __future__ import annotations

from scripts.spec_docs import DOCUMENT, spec_document


def test_the_reference_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == spec_document(), "run `make docs` and commit docs/spec.md"
