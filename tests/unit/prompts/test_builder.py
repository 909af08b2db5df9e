"""From rows to token ids with the real tokenizer, and what becomes of rows that do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.builder import Prepared, Prompt, PromptBuilder, Rejected
from tests.unit.fuzz.damage import fuzzed
from tests.unit.prompts.jobs import MODELS, job

pytestmark = pytest.mark.worker_env

CONTEXT = 256
LIMIT = CONTEXT - 28


def builder(tokenizer: Any, **fields: Any) -> PromptBuilder:
    return PromptBuilder(job(**fields), tokenizer, CONTEXT)


def only(results: list[Prepared | Rejected]) -> Prepared:
    (result,) = results
    assert isinstance(result, Prepared)
    return result


def decoded(tokenizer: Any, prepared: Prepared) -> list[str]:
    return [tokenizer.decode(prompt.token_ids) for prompt in prepared.prompts]


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


@fuzzed(200)
@given(text=st.text(min_size=1, max_size=80).filter(str.strip))
def test_ids_equal_the_tokenizers_own_chat_template(tokenizer: Any, text: str) -> None:
    prompt = only(builder(tokenizer).build([{"text": text}])).prompts[0]
    messages = [{"role": "user", "content": f"Read this: {text}\nIs it good?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == expected


def test_a_long_shared_prefix_changes_no_token(tokenizer: Any) -> None:
    prompt = {"template": "{{ text }}", "system": "You are careful. " * 8}
    texts = ["", "\n\nx", " x", "<|im_end|>", "'s", "漢字", "x" * 50]
    built = builder(tokenizer, prompt=prompt).build([{"text": t or "."} for t in texts])
    for text, result in zip(texts, built, strict=True):
        messages = [
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": text or "."},
        ]
        assert isinstance(result, Prepared)
        assert result.prompts[0].token_ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


def test_each_row_gets_its_own_result_in_order(tokenizer: Any) -> None:
    rows = [{"text": "fine"}, {"text": None}, {}, {"text": " \n"}, {"text": words(400)}, {"text": "good"}]
    results = builder(tokenizer).build(rows)
    reasons = [r.reason if isinstance(r, Rejected) else None for r in results]
    empty = Reason.EMPTY_INPUT
    assert reasons == [None, empty, empty, empty, Reason.OVER_LONG, None]
    assert isinstance(results[4], Rejected)
    assert "228 fit beside the answer" in results[4].message


def test_a_row_that_cannot_be_rendered_costs_only_itself(tokenizer: Any) -> None:
    prompt = {"template": "{{ text.strip() }}"}
    bad, good = builder(tokenizer, prompt=prompt).build([{"text": 5}, {"text": " x "}])
    assert isinstance(bad, Rejected)
    assert bad.reason is Reason.RENDER_ERROR
    assert "text" not in bad.message or "int" in bad.message
    assert isinstance(good, Prepared)


@pytest.mark.parametrize(
    ("keep", "first", "last"), [("start", "w0", None), ("end", None, "w399"), ("both", "w0", "w399")]
)
def test_truncate_cuts_the_column_and_never_the_instructions(
    tokenizer: Any, keep: str, first: str | None, last: str | None
) -> None:
    overlong = {"policy": "truncate", "column": "text", "keep": keep}
    prepared = only(builder(tokenizer, overlong=overlong).build([{"text": words(400)}]))
    (text,) = decoded(tokenizer, prepared)
    assert LIMIT - 2 <= prepared.tokens <= LIMIT
    assert "Read this: " in text
    assert "\nIs it good?<|im_end|>\n<|im_start|>assistant\n" in text
    body = text.split("Read this: ")[1].split("\nIs it good?")[0].split()
    assert (body[0] == first) is (first is not None)
    assert (body[-1] == last) is (last is not None)


def test_truncate_counts_a_column_used_twice(tokenizer: Any) -> None:
    overlong = {"policy": "truncate", "column": "text"}
    prompt = {"template": "{{ text }} again: {{ text }}"}
    prepared = only(builder(tokenizer, prompt=prompt, overlong=overlong).build([{"text": words(400)}]))
    assert LIMIT - 4 <= prepared.tokens <= LIMIT


def test_split_makes_windows_that_cover_the_column_and_overlap(tokenizer: Any) -> None:
    overlong = {"policy": "split", "column": "text", "overlap_tokens": 20}
    prepared = only(builder(tokenizer, overlong=overlong).build([{"text": words(400)}]))
    bodies = [text.split("Read this: ")[1].split("\nIs it good?")[0] for text in decoded(tokenizer, prepared)]
    assert all(len(p.token_ids or ()) <= LIMIT for p in prepared.prompts)
    joined = bodies[0]
    for body in bodies[1:]:
        shared = next(n for n in range(len(body), -1, -1) if joined.endswith(body[:n]))
        assert shared >= 20  # at least a character a token
        joined += body[shared:]
    assert joined == words(400)


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_instructions_that_do_not_fit_are_rejected_whatever_the_policy(tokenizer: Any, policy: str) -> None:
    overlong = {"policy": policy, "column": "text"}
    prompt = {"template": "{{ text }}", "system": words(200)}
    (result,) = builder(tokenizer, prompt=prompt, overlong=overlong).build([{"text": words(10)}])
    assert isinstance(result, Rejected)
    assert result.reason is Reason.OVER_LONG
    assert "not in column `text`" in result.message


def test_a_column_that_is_no_text_is_not_cut(tokenizer: Any) -> None:
    overlong = {"policy": "truncate", "column": "text"}
    (result,) = builder(tokenizer, overlong=overlong).build([{"text": list(range(400))}])
    assert isinstance(result, Rejected)
    assert "only text can be cut" in result.message


def test_an_answer_that_leaves_no_room_is_a_spec_error(tokenizer: Any) -> None:
    with pytest.raises(SpecError, match="leaves no room"):
        builder(tokenizer, sampling={"max_tokens": CONTEXT})


def test_a_text_engine_gets_messages_and_needs_no_tokenizer() -> None:
    plain = PromptBuilder(job(), None, None, takes_tokens=False)
    prompt = only(plain.build([{"text": "x"}])).prompts[0]
    assert prompt.messages == [{"role": "user", "content": "Read this: x\nIs it good?"}]
    with pytest.raises(SpecError, match=r"model\.tokenizer"):
        PromptBuilder(
            job(overlong={"policy": "truncate", "column": "text"}), None, CONTEXT, takes_tokens=False
        )


def test_a_text_engine_with_a_tokenizer_gets_cut_messages(tokenizer: Any) -> None:
    spec = job(overlong={"policy": "truncate", "column": "text"})
    build = PromptBuilder(spec, tokenizer, CONTEXT, takes_tokens=False).build
    (message,) = only(build([{"text": words(400)}])).prompts[0].messages or []
    assert message["content"].endswith("\nIs it good?")
    assert len(message["content"]) < len(words(400))


def test_a_slow_tokenizer_counts_and_rejects_but_a_policy_that_cuts_is_refused_at_once() -> None:
    from transformers import ByT5Tokenizer

    plain = {"prompt": {"template": "{{ text }}", "chat": False}}
    (rejected,) = PromptBuilder(job(**plain), ByT5Tokenizer(), CONTEXT).build([{"text": words(400)}])
    assert isinstance(rejected, Rejected)
    for policy in ("truncate", "split"):
        spec = job(overlong={"policy": policy, "column": "text"}, **plain)
        with pytest.raises(SpecError, match=rf"overlong\.policy: `{policy}` needs a fast tokenizer"):
            PromptBuilder(spec, ByT5Tokenizer(), CONTEXT)


def test_plain_text_jobs_get_the_tokenizers_special_tokens() -> None:
    from transformers import AutoTokenizer

    minilm = AutoTokenizer.from_pretrained(MODELS / "minilm")
    spec = job(task={"type": "embed"}, prompt={"template": "{{ text }}"})
    prompt = only(PromptBuilder(spec, minilm, CONTEXT).build([{"text": "hello world"}])).prompts[0]
    assert minilm.decode(prompt.token_ids) == "[CLS] hello world [SEP]"


def test_answers_of_windows_are_combined() -> None:
    windows = (Prompt(text="a"), Prompt(text="b"), Prompt(text="c"))
    assert Prepared(windows, "concat", " | ").combine(["x", "y", "z"]) == "x | y | z"
    assert json.loads(Prepared(windows, "list").combine(["x", 'y"', "é"])) == ["x", 'y"', "é"]
    assert Prepared(windows, "majority").combine(["no", "yes", "yes"]) == "yes"
    assert Prepared(windows, "majority").combine(["no", "yes", "maybe"]) == "no"
