"""Texts to token ids with the model's own tokenizer, in batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.hub import from_hub
from airflow_batchinfer.spec import EmbedTask, JobSpec

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_target_positions",
)
"""Where models' configurations say how long a sequence may be; the order vLLM looks in."""

_SENTENCE_CONFIG = "sentence_bert_config.json"

_PROBE_TAILS = ("", " ", "\n", "text", " text", "\n\ntext", "Ünï 漢字", "<|im_end|>", "</s>", "'s", "123")


def load_tokenizer(spec: JobSpec) -> Any:
    """The job's tokenizer.

    Raises:
        SpecError: it cannot be loaded.
        EngineError: not now, as the hub is away.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        extra = "vllm" if spec.model.backend == "vllm" else "tokenizer"
        raise SpecError(
            "model.tokenizer: the worker's environment lacks `transformers`, which counts prompts: install "
            f"`airflow-provider-batchinfer[{extra}]` there"
        ) from error

    model = spec.model
    name = model.tokenizer or model.name
    revision = model.engine.get("tokenizer_revision", model.revision)
    field = "model.tokenizer" if model.tokenizer else "model.name"
    try:
        with from_hub(field, name):
            return AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=model.trust_remote_code
            )
    except (OSError, ValueError) as error:
        remedy = "" if model.backend != "openai" or model.tokenizer else "; name one in `model.tokenizer`"
        raise SpecError(f"{field}: no tokenizer can be loaded from `{name}`{remedy}: {error}") from error


def context_length(spec: JobSpec) -> int:
    """Tokens that prompt and answer may have together, before an engine is there to ask.

    Raises:
        SpecError: neither `model.engine.max_model_len` nor the model's configuration says so.
        EngineError: the configuration cannot be loaded now, as the hub is away.
    """
    said = spec.model.engine.get("max_model_len")
    if isinstance(said, int) and said > 0:
        return said
    from transformers import AutoConfig

    model = spec.model
    try:
        with from_hub("model.name", model.name):
            config = AutoConfig.from_pretrained(
                model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
            ).get_text_config()
    except (OSError, ValueError) as error:
        raise SpecError(f"model.name: no configuration can be loaded from `{model.name}`: {error}") from error
    if isinstance(spec.task, EmbedTask) and (trained := trained_length(spec)):
        return trained
    lengths = [v for k in _LENGTH_KEYS if isinstance(v := getattr(config, k, None), int) and v > 0]
    if not lengths:
        raise SpecError(
            f"model.engine.max_model_len: set it; `{model.name}` does not say how long its context is"
        )
    return min(lengths)


def trained_length(spec: JobSpec) -> int | None:
    """The length that an embedding model was trained for, where it says so; often below its positions.

    Raises:
        EngineError: it is not known now, as the hub is away: taken for none, it would change the prompts.
    """
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
    from transformers.utils import cached_file

    name, revision = spec.model.name, spec.model.revision
    local = Path(name).is_dir()  # the cache knows names of the hub only, and refuses any other
    if not local and try_to_load_from_cache(name, _SENTENCE_CONFIG, revision=revision) is _CACHED_NO_EXIST:
        return None
    try:
        with from_hub("model.name", name):
            path = cached_file(name, _SENTENCE_CONFIG, revision=revision)
    except OSError:  # the model has no such file; `cached_file` has no type of its own for that
        return None
    length = json.loads(Path(path).read_text(encoding="utf-8")).get("max_seq_length")
    return length if isinstance(length, int) else None


def prompt_limit(spec: JobSpec, max_model_len: int) -> int:
    """Most tokens a prompt may have so that a full answer fits behind it.

    Raises:
        SpecError: the answer alone does not fit.
    """
    if isinstance(spec.task, EmbedTask):
        return max_model_len
    limit = max_model_len - spec.sampling.max_tokens
    if limit < 1:
        raise SpecError(
            f"sampling.max_tokens: {spec.sampling.max_tokens} leaves no room for a prompt in a context of "
            f"{max_model_len} tokens; lower it, or raise `model.engine.max_model_len`"
        )
    return limit


class TextEncoder:
    """Encodes texts that may all begin with the same prefix; the prefix is encoded once.

    That is done only where it cannot change a token: the prefix is cut behind a special token, which
    tokenizers split off before anything else, and the result is compared with the plain one on probes.
    """

    def __init__(self, tokenizer: Any, *, add_special_tokens: bool, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._add_special_tokens = add_special_tokens
        if self._backend is not None:
            # What another user of this tokenizer may have set; we never pad, and cut by our own rules.
            self._backend.no_padding()
            self._backend.no_truncation()
        self._head: list[int] = []
        self._cut = 0
        if self._backend is not None and prefix and not add_special_tokens:
            self._cut_prefix(prefix)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, special tokens included."""
        if not self._cut:
            return self._encode(texts)
        head, cut = self._head, self._cut
        return [head + ids for ids in self._encode([text[cut:] for text in texts])]

    @property
    def knows_spans(self) -> bool:
        """Whether it can tell where a text's tokens are: fast tokenizers can."""
        return self._backend is not None

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a text begins and ends, in characters; no special tokens are added.

        Only of a tokenizer that `knows_spans`.
        """
        assert self._backend is not None
        offsets: list[tuple[int, int]] = self._backend.encode(text, add_special_tokens=False).offsets
        return offsets

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=self._add_special_tokens
            )
            return [encoding.ids for encoding in encodings]
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=self._add_special_tokens, return_attention_mask=False
        )["input_ids"]
        return ids

    def _cut_prefix(self, prefix: str) -> None:
        assert self._backend is not None
        encoding = self._backend.encode(prefix, add_special_tokens=False)
        added = self._backend.get_added_tokens_decoder()
        for i in reversed(range(len(encoding.ids))):
            token = added.get(encoding.ids[i])
            if token is None or token.normalized or token.lstrip or token.rstrip or token.single_word:
                continue
            if any(
                o.content != token.content and o.content.startswith(token.content) for o in added.values()
            ):
                continue
            head, cut = encoding.ids[: i + 1], encoding.offsets[i][1]
            if self._same(prefix, head, cut):
                self._head, self._cut = head, cut
            return

    def _same(self, prefix: str, head: list[int], cut: int) -> bool:
        whole = self._encode([prefix + tail for tail in _PROBE_TAILS])
        rest = self._encode([prefix[cut:] + tail for tail in _PROBE_TAILS])
        return all(w == head + r for w, r in zip(whole, rest, strict=True))
