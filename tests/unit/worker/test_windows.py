"""Over-long rows that are split into windows: several requests, one answer."""

from __future__ import annotations

import pytest

from tests.unit.worker.conftest import ROOT, Run, texts

pytestmark = pytest.mark.worker_env

MODEL = ROOT / ".build" / "models" / "smollm2"


@pytest.mark.parametrize("engine", ["InstantEngine", "FaultyEngine"])
def test_windows_are_sent_apart_and_their_answers_become_one(run: Run, engine: str) -> None:
    words = " ".join(f"word{i}" for i in range(120))
    # In the faulty engine, the second window of row 2 is refused: it costs the row, and only it.
    long = {1: words, 2: words + " <<refuse>> " + words}
    model = {
        "name": str(MODEL),
        "backend": f"tests.engines:{engine}",
        "engine": {"max_model_len": 200, "paid_log": str(run.paid_log), "delay_seconds": 0.01},
    }
    overlong = {"policy": "split", "column": "text", "overlap_tokens": 8, "separator": " | "}
    run.plan(texts(5, long), model=model, sampling={"max_tokens": 50}, overlong=overlong)
    assert run.work()[0] == 0
    results = run.results()
    assert results[0]["output"].count(" | ") == 0
    assert results[1]["output"].count(" | ") == run.paid()[1] - 1 > 1
    assert results[1]["prompt_tokens"] > results[0]["prompt_tokens"]
    assert results[2]["outcome"] == ("failed" if engine == "FaultyEngine" else "succeeded")
    assert run.outcomes()["succeeded"] == (4 if engine == "FaultyEngine" else 5)
