"""`JobSpec`: what the user wants done, as YAML, JSON or Python.

The models refuse unknown fields and say what is allowed. Their JSON Schema feeds
`docs/spec.md` and the form in Airflow's UI, so every field carries a description.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import jinja2
import regex
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_jsonable_python

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.store.address import address_problem
from airflow_batchinfer.store.options import S3Options

MAX_MAPPED_TASKS = 1024
"""Airflow's default `[core] max_map_length`: a longer list fails the task that returns it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SECRET_ENDINGS = ("hf_token", "api_key", "password", "secret", "access_key")
_TAKEN_NAMES = frozenset({"dead_letters"})  # see `run.layout`: it stands beside the jobs' folders
RESERVED_OUTPUT_COLUMNS = frozenset(
    {
        "row_id",
        "custom_id",
        "finish_reason",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "attempts",
        "finished_at",
        "copy_of",
        "job",
        "run_id",
        "run_created_at",
        "generation",
        "answered_in",
        "merged_by",
        "fingerprint",
        "run_fingerprint",
        "input_digest",
        "change",
    }
)
"""Columns the results table always has; an output or carried column may not take their names."""


FROM_STORE = {"from_store": True}
"""Validation context of a spec that stands in a stored document.

It was accepted when its run was planned. Refusals that only save the author of a new spec from a mistake
leave it alone, or each one that is added would make plans unreadable whose rows are paid for. What the code
relies on is checked all the same.
"""


def _is_stored(info: ValidationInfo) -> bool:
    return bool(info.context == FROM_STORE)


def _storage_options(value: dict[str, str]) -> dict[str, str]:
    try:
        S3Options.parse(value)
    except SpecError as error:
        raise ValueError(str(error)) from error
    return value


StorageOptions = Annotated[dict[str, str], AfterValidator(_storage_options)]
"""Settings of an S3 store. A credential among them is refused: plans and rendered templates show them."""


def _json_value(value: Any) -> Any:
    """The value as it comes back from the plan, which is JSON."""
    try:
        text = json.dumps(to_jsonable_python(value), allow_nan=False, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (ValueError, TypeError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(f"is no JSON: {error}") from error


JsonFields = Annotated[dict[str, Any], AfterValidator(_json_value)]
"""Fields of somebody else's: whatever JSON can hold, since the plan is JSON."""


def _without_credentials(address: str) -> str:
    if "://" in address and "@" in urlsplit(address).netloc:
        raise ValueError("an address never holds a user or a password: plans and logs show it")
    return address


Address = Annotated[str, AfterValidator(_without_credentials)]
"""A URL."""


def _local_or_s3(path: str, info: ValidationInfo) -> str:
    problem = address_problem(path)
    if problem and not _is_stored(info):
        raise ValueError(problem)
    return path


Location = Annotated[str, AfterValidator(_without_credentials), AfterValidator(_local_or_s3)]
"""A local path or `s3://bucket/prefix`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


class InputSpec(_Strict):
    """The dataset: which files, and which columns matter besides those the prompt names."""

    path: str | list[str] = Field(
        description=(
            "File, folder, glob (only `**` crosses a `/`), or a list of them; local, `s3://` or a Delta "
            "table's folder. Folders and globs pass over names that begin with `.` or `_`, unless the glob "
            "itself says so (`_*`)."
        )
    )
    format: Literal["auto", "parquet", "jsonl", "csv", "delta"] = Field(
        "auto", description="`auto` goes by the file's extension (`.gz` and `.zst` are looked through)."
    )
    id_column: str | None = Field(
        None, description="Your own id of a row: unique, not null. It appears as `custom_id`."
    )
    carry: list[str] = Field(
        default_factory=list, description="Input columns to copy into the results beside the outputs."
    )
    truth: str | None = Field(
        None, description="Column with the true label, if there is one: the report then gives accuracy."
    )
    storage_options: StorageOptions = Field(
        default_factory=dict,
        description="For `s3://` inputs: `endpoint_url`, `region`, `addressing_style`. Never credentials.",
    )

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        paths = [value] if isinstance(value, str) else value
        if not paths or not all(p.strip() for p in paths):
            raise ValueError("name at least one file, folder or glob")
        for path in paths:
            _local_or_s3(_without_credentials(path), info)
        return value

    @property
    def paths(self) -> list[str]:
        """The path or paths as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)


class Message(_Strict):
    """One chat message; `content` is a Jinja template over the row's columns."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: str = Field(description="Jinja template; sees only the row's columns.")


class Example(_Strict):
    """A worked example shown to the model before the row (few-shot); literal text, not a template."""

    user: str = Field(description="What the user says.")
    assistant: str = Field(description="The answer the model should imitate.")


class PromptSpec(_Strict):
    """How a row becomes a prompt: one template, or chat messages."""

    template: str | None = Field(
        None, description="Jinja template of the user's message, for instance `Classify: {{ text }}`."
    )
    system: str | None = Field(
        None, description="System message, literal text shared by all rows (a long one is cached once)."
    )
    messages: list[Message] | None = Field(
        None, description="Chat messages with roles, instead of `template` and `system`."
    )
    examples: list[Example] = Field(
        default_factory=list, description="Few-shot examples, put before the last user message."
    )
    chat: bool = Field(
        True, description="Apply the model's chat template. `false` sends the rendered template as it is."
    )
    chat_template: str | None = Field(
        None, description="Jinja chat template to use instead of the tokenizer's own."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.template is None) == (self.messages is None):
            raise ValueError("give exactly one of `template` and `messages`")
        if self.messages is not None:
            if self.system is not None:
                raise ValueError("with `messages`, put the system text in a message of role `system`")
            if not self.messages or self.messages[-1].role != "user":
                raise ValueError("the last of `messages` must have role `user`")
        if not self.chat and (self.messages or self.system or self.examples or self.chat_template):
            raise ValueError("`chat: false` takes only `template`")
        for where, text in self.templates().items():
            try:
                jinja2.Environment(autoescape=False).parse(text)
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(f"{where}: line {error.lineno}: {error.message}") from error
            except RecursionError as error:
                raise ValueError(f"{where}: an expression is nested too deep") from error
        return self

    def templates(self) -> dict[str, str]:
        """The Jinja templates by the field that holds them."""
        if self.messages is not None:
            return {f"messages.{i}.content": m.content for i, m in enumerate(self.messages)}
        assert self.template is not None
        return {"template": self.template}


class ModelSpec(_Strict):
    """The model and the engine that serves it."""

    name: str = Field(
        description="Hugging Face name or local folder of the model; `openai`: the server's name of it."
    )
    revision: str | None = Field(
        None, description="Commit, tag or branch. Pin a commit: results depend on it, and branches move."
    )
    tokenizer: str | None = Field(
        None,
        description=(
            "Name or folder of the tokenizer, if not the model's own. `openai`: needed to count prompts, and "
            "so for `overlong.policy: truncate` and `split`."
        ),
    )
    backend: str = Field(
        "vllm",
        description=(
            "`vllm` (a process beside the worker's, which the worker starts), `openai` (a server that runs "
            "already and speaks OpenAI's HTTP API), or `package.module:Class` of your own engine."
        ),
    )
    engine: JsonFields = Field(
        default_factory=dict,
        description=(
            "Engine arguments by vLLM's own names, for instance `max_model_len: 4096`. `openai`: fields that "
            "each request gets; but `max_model_len` is not sent, it says how long the context is where the "
            "server does not."
        ),
    )
    adapter: str | None = Field(None, description="LoRA adapter: Hugging Face name or folder.")
    compile_cache: str | None = Field(
        None,
        description=(
            "`vllm` only: folder for compiled code, as the worker sees it; on a shared volume only the first "
            "worker compiles. In pods the default does: which volume it is says `infer_arguments`."
        ),
    )
    trust_remote_code: bool = Field(
        False, description="Let the model's repository run its own code in the worker. Off unless said."
    )
    base_url: Address | None = Field(None, description="`openai` only: the server, up to and with `/v1`.")
    api_key_env: str | None = Field(
        None, description="`openai` only: name of the environment variable that holds the key."
    )
    max_concurrency: int = Field(
        64, ge=1, le=4096, description="`openai` only: most requests open at once; falls on 429 and 5xx."
    )

    @model_validator(mode="after")
    def _backend(self) -> Self:
        if self.backend == "openai":
            if not self.base_url:
                raise ValueError("`backend: openai` needs `base_url`")
        elif self.base_url or self.api_key_env:
            raise ValueError("`base_url` and `api_key_env` belong to `backend: openai`")
        if self.backend not in ("vllm", "openai") and not re.fullmatch(r"[\w.]+:\w+", self.backend):
            raise ValueError("`backend` must be `vllm`, `openai` or `package.module:Class`")
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError("`api_key_env` names the variable that holds the key, it is not the key")
        for name, value in self.engine.items():
            if name.lower().endswith(_SECRET_ENDINGS) and isinstance(value, str):
                raise ValueError(
                    f"`engine.{name}` looks like a credential, and plans and reports show the spec: set "
                    "it in the worker's environment (HF_TOKEN for Hugging Face)"
                )
        if "trust_remote_code" in self.engine:
            raise ValueError("set `model.trust_remote_code`, not `model.engine.trust_remote_code`")
        return self

    @model_validator(mode="after")
    def _one_replica(self, info: ValidationInfo) -> Self:
        replicas = [name for name in self.engine if name.startswith("data_parallel")]
        if replicas and self.backend == "vllm" and not _is_stored(info):
            # vLLM's own class for batches refuses it as well: it may hang.
            raise ValueError(
                f"leave out `engine.{replicas[0]}`: a worker's engine is one replica of the model; more "
                "workers at once are `sharding.max_parallel_shards`"
            )
        return self


class GenerateTask(_Strict):
    """Free text."""

    type: Literal["generate"] = Field("generate", description="Free text.")


class ChoiceTask(_Strict):
    """One label of a set, enforced while decoding."""

    type: Literal["choice"] = Field(description="One of `labels`, enforced while decoding.")
    labels: list[str] = Field(min_length=2, description="The allowed answers.")

    @field_validator("labels")
    @classmethod
    def _distinct(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value) or not all(v.strip() for v in value):
            raise ValueError("labels must be distinct and not blank")
        return value


class JsonTask(_Strict):
    """An object that fits a JSON Schema, enforced while decoding."""

    type: Literal["json"] = Field(description="An object that fits `schema`.")
    json_schema: JsonFields = Field(alias="schema", description="JSON Schema of the answer.")
    compact: bool = Field(
        True,
        description=(
            "`backend: vllm`: no whitespace between JSON tokens; it would be paid for, and small models run "
            "away in it. A server decides this itself."
        ),
    )

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)


class RegexTask(_Strict):
    """Text that matches a regular expression, enforced while decoding."""

    type: Literal["regex"] = Field(description="Text that matches `pattern` as a whole.")
    pattern: str = Field(min_length=1, description="Regular expression.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)  # which engines read more likely than what only `regex` knows
            regex.compile(value)  # by which answers are judged
        except (re.error, regex.error, ValueError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class EmbedTask(_Strict):
    """One vector a row."""

    type: Literal["embed"] = Field(description="A vector; the model must be an embedding model.")
    normalize: bool = Field(True, description="Scale each vector to length 1.")


TaskSpec = Annotated[
    GenerateTask | ChoiceTask | JsonTask | RegexTask | EmbedTask, Field(discriminator="type")
]


class SamplingSpec(_Strict):
    """Decoding settings, the same for all rows."""

    max_tokens: int = Field(256, ge=1, description="Most tokens in an answer.")
    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling.")
    top_k: int = Field(0, ge=0, description="0 is off.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="0 is off.")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="0 is off.")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="0 is off.")
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0, description="1 is off.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer.")
    seed: int = Field(0, ge=0, description="Seed of the first attempt at a row; the next adds 1.")


class OutputSpec(_Strict):
    """Names of the columns in the results table."""

    column: str = Field("output", description="Column of the answer: text, label, struct or vector.")
    carry_prefix: str = Field("", description="Put before the names of carried columns.")

    @field_validator("column")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in RESERVED_OUTPUT_COLUMNS or not value.strip():
            raise ValueError(
                f"`{value}` is taken by the results table; reserved: {sorted(RESERVED_OUTPUT_COLUMNS)}"
            )
        return value


class ShardingSpec(_Strict):
    """How rows are cut into shards, and how many run at once."""

    max_rows: int = Field(50_000, ge=1, description="Most rows in a shard.")
    target_tokens: int = Field(
        20_000_000, ge=1, description="Predicted tokens (prompt and answer) of a shard, about."
    )
    max_shards: int = Field(
        MAX_MAPPED_TASKS, ge=1, le=MAX_MAPPED_TASKS, description="Never more; shards grow instead."
    )
    max_parallel_shards: int = Field(
        4,
        ge=1,
        description=(
            "Workers that run at once in one run; the argument of `batch_inference` goes before it, and with "
            "a function as spec only that counts."
        ),
    )
    shards_per_task: int = Field(1, ge=1, description="Shards that one worker process takes in a row.")
    dedup: bool = Field(True, description="Send rows whose prompt columns are identical once only.")


class CheckpointSpec(_Strict):
    """How often a worker makes results durable, and how it leaves."""

    rows: int = Field(5_000, ge=1, description="Write a part after so many finished rows, or")
    seconds: float = Field(60.0, gt=0, description="after so many seconds, whichever comes first.")
    grace_seconds: float = Field(
        20.0, ge=0, description="On SIGTERM: let rows in flight finish for so long, then abort and flush."
    )
    progress_seconds: float = Field(5.0, gt=0, description="Interval of `progress.json`.")


class RetrySpec(_Strict):
    """What is tried again inside a worker; Airflow's own retries are set on the task."""

    invalid_attempts: int = Field(
        2,
        ge=1,
        description="Attempts at a row whose output is invalid, in all; one where vLLM decodes greedily "
        "(`temperature: 0`), as the next would say the same.",
    )
    engine_attempts: int = Field(3, ge=1, description="Attempts at a row on transient engine errors, in all.")
    backoff_seconds: float = Field(
        1.0, ge=0, description="First wait before such an attempt, or one at a restart; doubles, up to 60 s."
    )
    row_timeout_seconds: float = Field(
        600.0, gt=0, description="A row that runs for longer is aborted; waiting in a queue does not count."
    )
    stall_seconds: float = Field(
        300.0,
        gt=0,
        description="An engine that makes no token for so long while rows wait is restarted. A server shows "
        "no token before a whole answer: with `backend: openai` at least `row_timeout_seconds` and a minute.",
    )
    startup_seconds: float = Field(1800.0, gt=0, description="Deadline of each start of the engine.")
    engine_restarts: int = Field(20, ge=0, description="Engine restarts a worker may make in a shard.")
    restart_attempts: int = Field(
        3, ge=1, description="Attempts at one such restart, in all, each with `startup_seconds` of its own."
    )
    reclaims: int = Field(50, ge=0, description="Re-launches after a reclaim; they use up no task retry.")


class OverLongSpec(_Strict):
    """What becomes of a row whose prompt and answer do not fit the model's context."""

    policy: Literal["reject", "truncate", "split"] = Field(
        "reject", description="`truncate` and `split` cut the named column, never the instructions."
    )
    column: str | None = Field(None, description="The column to cut; needed unless `reject`.")
    keep: Literal["start", "end", "both"] = Field(
        "start", description="`truncate`: what to keep; `both` cuts the middle."
    )
    overlap_tokens: int = Field(64, ge=0, description="`split`: tokens that neighbouring windows share.")
    combine: Literal["concat", "list", "majority"] = Field(
        "concat",
        description=(
            "`split`: how the windows' answers become one: `concat` or `list` for `task.type: generate`, "
            "`majority` for `choice`; other tasks have no way."
        ),
    )
    separator: str = Field("\n", description="`split` with `concat`: put between the answers.")

    @model_validator(mode="after")
    def _needs_column(self) -> Self:
        if self.policy != "reject" and not self.column:
            raise ValueError(f"`policy: {self.policy}` needs `column`, the column to cut")
        return self


_COMBINATIONS = {"generate": ("concat", "list"), "choice": ("majority",)}
"""By task, the `overlong.combine` whose outcome is again an answer of the task."""


def _known_reason(name: str, info: ValidationInfo) -> str:
    known = [reason.value for reason in Reason]
    if name not in known and not _is_stored(info):
        raise ValueError(f"unknown reason (allowed: {', '.join(known)})")
    return name


class FailureSpec(_Strict):
    """How much may go wrong before `validate` holds the results back."""

    max_dead_fraction: float = Field(
        0.05, ge=0.0, le=1.0, description="Most dead letters, as a fraction of the input rows."
    )
    max_dead_by_reason: dict[
        Annotated[str, AfterValidator(_known_reason)], Annotated[float, Field(ge=0.0, le=1.0)]
    ] = Field(
        default_factory=dict,
        description=(
            "The same for single reasons, e.g. `over_long: 0.01`. Reasons are "
            f"{', '.join(f'`{reason}`' for reason in Reason)}."
        ),
    )


OnFailure = Literal["hold", "warn", "dead_letter"]
"""What a failed expectation does."""


class ValidationSpec(_Strict):
    """Great Expectations checks on the outputs; those that follow from the task come by themselves."""

    enabled: bool = Field(True, description="Run the checks.")
    expectations: list[JsonFields] = Field(
        default_factory=list,
        description=(
            "Great Expectations, each `{type: expect_..., kwargs: {...}}` over the results' columns; with "
            "`severity` and its own `on_failure`, if it is to have another one."
        ),
    )
    suite: str | None = Field(None, description="Path of a suite in Great Expectations' JSON.")
    on_failure: OnFailure = Field(
        "hold",
        description=(
            "`hold`: `validate` fails and nothing is published; `warn`: the report says so; `dead_letter`: "
            "rows that fail become dead letters (`invalid`), and the other rows are published."
        ),
    )
    sample_rows: int = Field(
        20_000,
        ge=1,
        description=(
            "Rows that are checked, at most, drawn at random: of each shard where expectations judge single "
            "rows, of the whole run where not. Those with `dead_letter` see every row, so many at a time."
        ),
    )
    min_accuracy: float | None = Field(
        None, ge=0.0, le=1.0, description="Least accuracy against `input.truth`; for `task.type: choice`."
    )

    @property
    def quarantines(self) -> bool:
        """Whether an expectation can take rows out of the results."""
        asked = (self.on_failure, *(e.get("on_failure") for e in self.expectations))
        return self.enabled and "dead_letter" in asked


class LineSpec(_Strict):
    """When a running worker stops the line: shares of the last rows that came out of the engine.

    Rows that were never sent (over-long, empty, not renderable) do not count: they cost nothing.
    """

    window: int = Field(500, ge=1, description="Rows looked back at.")
    min_rows: int = Field(100, ge=1, description="No judgement before so many rows.")
    max_dead: float | None = Field(0.5, ge=0.0, le=1.0, description="Most rows that did not succeed.")
    max_empty: float | None = Field(None, ge=0.0, le=1.0, description="Most rows with a blank output.")
    max_length: float | None = Field(
        None, ge=0.0, le=1.0, description="Most rows whose answer was cut at `sampling.max_tokens`."
    )
    max_identical: float | None = Field(
        None, ge=0.0, le=1.0, description="Most rows with one and the same output."
    )

    @model_validator(mode="after")
    def _judges_at_all(self, info: ValidationInfo) -> Self:
        if self.min_rows > self.window and not _is_stored(info):
            raise ValueError(
                f"`min_rows` ({self.min_rows}) is more than `window` ({self.window}) holds: nothing would be "
                "judged"
            )
        return self


class PilotSpec(_Strict):
    """A sample that runs before the fleet, as shard 0: its results count and are not paid again."""

    rows: int = Field(200, ge=1, description="Rows of the pilot, spread evenly over all lengths.")
    stratify: list[str] = Field(
        default_factory=list,
        description="Input columns with few values: each combination gets its share of the pilot.",
    )
    seed: int = Field(0, ge=0, description="Seed of the draw.")


class GateSpec(_Strict):
    """What the pilot must show before the fleet may start, and the judge before results are published.

    A limit left out is not checked. All but `min_judge_pass` need a `pilot`.
    """

    max_dead_fraction: float | None = Field(
        0.25, ge=0.0, le=1.0, description="Most pilot rows that did not succeed."
    )
    max_empty_fraction: float | None = Field(
        None, ge=0.0, le=1.0, description="Most pilot rows with a blank output."
    )
    max_length_fraction: float | None = Field(
        None, ge=0.0, le=1.0, description="Most pilot rows whose answer was cut at `sampling.max_tokens`."
    )
    max_refusal_fraction: float | None = Field(
        None, ge=0.0, le=1.0, description="Most pilot rows in which the model refuses (`generate` only)."
    )
    max_identical_fraction: float | None = Field(
        None, ge=0.0, le=1.0, description="Most pilot rows with one and the same output."
    )
    min_accuracy: float | None = Field(
        None, ge=0.0, le=1.0, description="Least accuracy against `input.truth` on the pilot."
    )
    max_tokens: int | None = Field(None, ge=1, description="Most tokens forecast for the run.")
    max_held_hours: float | None = Field(None, gt=0.0, description="Most worker hours forecast for the run.")
    max_hours: float | None = Field(
        None, gt=0.0, description="Most hours forecast for the run at `sharding.max_parallel_shards`."
    )
    max_cost: float | None = Field(None, gt=0.0, description="Most money forecast for the run; needs `cost`.")
    min_judge_pass: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="Least share of the judged rows that pass the `judge`; below it the results are held.",
    )
    approval: Literal["none", "required"] = Field(
        "none", description="`required`: a person approves the pilot in Airflow before the fleet starts."
    )


class JudgeSpec(_Strict):
    """A second model call that scores a sample of the answers; its result is a limit of `gate`."""

    rows: int = Field(
        200, ge=1, le=10_000, description="Rows of the sample: each label, or length, has its share."
    )
    seed: int = Field(0, ge=0, description="Seed of the draw.")
    prompt: PromptSpec = Field(
        description=(
            "The rubric. Its templates see the columns of the job's prompt, the carried ones, and the answer "
            "under the name of `output.column`."
        )
    )
    model: ModelSpec | None = Field(None, description="The judge's model; default: the job's own.")
    task: Annotated[ChoiceTask | JsonTask, Field(discriminator="type")] = Field(
        description="`choice` of verdicts, or `json` with a number as score."
    )
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, description="The judge's decoding.")
    passing: list[str] = Field(default_factory=list, description="`choice`: labels with which a row passes.")
    score: str = Field("score", description="`json`: property that holds the score.")
    min_score: float | None = Field(None, description="`json`: least score with which a row passes.")

    @model_validator(mode="after")
    def _can_pass(self) -> Self:
        if isinstance(self.task, ChoiceTask):
            unknown = set(self.passing) - set(self.task.labels)
            if not self.passing or unknown:
                raise ValueError(f"`passing` must name some of the labels {', '.join(self.task.labels)}")
            return self
        if self.score not in self.task.json_schema.get("properties", {}):
            raise ValueError(f"`score`: the schema has no property `{self.score}`")
        if self.min_score is None:
            raise ValueError("`task.type: json` needs `min_score`, the least score with which a row passes")
        return self


_LIMITS_ON_TEXT = (
    *("gate.max_empty_fraction", "gate.max_length_fraction", "gate.max_identical_fraction"),
    *("line.max_empty", "line.max_length", "line.max_identical"),
)


class CostSpec(_Strict):
    """Prices, to turn held time and tokens into money. A price left out counts as nothing."""

    currency: str = Field("USD", min_length=1, max_length=8, description="For the reader only.")
    per_hour: float = Field(
        0.0,
        ge=0.0,
        description=(
            "One worker held for an hour, its accelerators with it. With `backend: openai` it holds none: "
            "give its share of the server's price, or price tokens."
        ),
    )
    per_million_prompt_tokens: float = Field(
        0.0, ge=0.0, description="For engines that bill tokens; cached tokens cost what the next field says."
    )
    per_million_cached_tokens: float = Field(0.0, ge=0.0, description="Prompt tokens served from a cache.")
    per_million_output_tokens: float = Field(0.0, ge=0.0, description="Tokens of answers.")

    @property
    def free(self) -> bool:
        """Whether there is no price at all."""
        return self == CostSpec(currency=self.currency)


class DriftSpec(_Strict):
    """Comparison with the job's last published run; a difference is a warning in the report.

    Runs that answer a part of their input are not compared: incremental ones that keep results, and replays.
    """

    enabled: bool = Field(True, description="Compare.")
    max_psi: float = Field(
        0.2, gt=0.0, description="Population stability index of labels, output and prompt lengths."
    )
    max_validity_change: float = Field(
        0.05, gt=0.0, le=1.0, description="Change of the share of rows that succeed."
    )
    on_drift: Literal["warn", "hold"] = Field(
        "warn", description="`hold`: `validate` fails and nothing is published."
    )


class ReportSpec(_Strict):
    """The report a run ends with."""

    samples: int = Field(20, ge=0, le=1000, description="Prompts and outputs shown, drawn at random.")
    seed: int = Field(0, ge=0, description="Seed of that draw.")
    review_rows: int = Field(
        50, ge=0, le=5000, description="Rows of `review.csv`, a sheet for a person to mark; 0 for none."
    )


class ExportSpec(_Strict):
    """A plain file of the results beside the table, in input order."""

    format: Literal["parquet", "jsonl", "csv"] = Field(description="File format.")
    path: Location = Field(description="Where to; local or `s3://`. `{run_id}` and `{job}` are filled in.")


class JobSpec(_Strict):
    """A job: a dataset, a prompt, a model, and what a good answer looks like."""

    name: str = Field(description="The job's name: letters, digits, `.`, `_` and `-`.", max_length=100)
    input: InputSpec = Field(description="The dataset.")
    prompt: PromptSpec = Field(description="How a row becomes a prompt.")
    model: ModelSpec = Field(description="The model and its engine.")
    store: Location = Field(description="Folder of runs and tables: a local path or `s3://bucket/prefix`.")
    storage_options: StorageOptions = Field(
        default_factory=dict,
        description=(
            "For an `s3://` store: `endpoint_url`, `region`, `addressing_style`, `sse`. Never credentials."
        ),
    )
    task: TaskSpec = Field(default_factory=GenerateTask, description="What the model has to produce.")
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, description="Decoding settings.")
    output: OutputSpec = Field(default_factory=OutputSpec, description="Names of output columns.")
    sharding: ShardingSpec = Field(default_factory=ShardingSpec, description="Shards and parallelism.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="Durability.")
    retry: RetrySpec = Field(default_factory=RetrySpec, description="Retries inside a worker.")
    overlong: OverLongSpec = Field(default_factory=OverLongSpec, description="Prompts that do not fit.")
    failure: FailureSpec = Field(default_factory=FailureSpec, description="Tolerance for dead letters.")
    validation: ValidationSpec = Field(default_factory=ValidationSpec, description="Checks on the outputs.")
    line: LineSpec = Field(default_factory=LineSpec, description="Stop-the-line while running.")
    pilot: PilotSpec | None = Field(None, description="Run a sample first and judge it by `gate`.")
    gate: GateSpec = Field(default_factory=GateSpec, description="What the pilot must show.")
    judge: JudgeSpec | None = Field(None, description="Have a model score a sample of the answers.")
    cost: CostSpec | None = Field(None, description="Prices, for the forecast and the report.")
    drift: DriftSpec = Field(default_factory=DriftSpec, description="Comparison with the last published run.")
    report: ReportSpec = Field(default_factory=ReportSpec, description="The report.")
    export: list[ExportSpec] = Field(
        default_factory=list,
        description="Plain files of the run's own results; what replays resolve is in the table alone.",
    )
    incremental: bool = Field(
        False,
        description=(
            "Send only rows whose content or job changed since the last published run; the others keep "
            "their result. Needs `input.id_column`."
        ),
    )
    removed_rows: Literal["tombstone", "keep"] = Field(
        "tombstone",
        description=(
            "Incremental runs: a row gone from the input stays in the results with its output emptied "
            "(`tombstone`, for one run) or as it was (`keep`); either way its `change` is `removed`."
        ),
    )
    on_changed_spec: Literal["fail", "restart"] = Field(
        "fail",
        description=(
            "When a run's plan exists and the spec has changed since: `fail` names the fields; "
            "`restart` starts a new generation and keeps the old one on disk."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _can_be_stored(cls, data: Any) -> Any:
        problem = _unstorable(data)
        if problem:
            raise ValueError(problem)
        return data

    @field_validator("name")
    @classmethod
    def _path_safe(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("use letters, digits, `.`, `_` and `-`, and start with a letter or digit")
        if value.lower() in _TAKEN_NAMES:
            raise ValueError(f"`{value}` is the name of a table's folder in the store")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for column in self.carried:
            name = self.output.carry_prefix + column
            if name in RESERVED_OUTPUT_COLUMNS or name == self.output.column:
                raise ValueError(
                    f"carried column `{name}` collides with a column of the results table; "
                    "set `output.carry_prefix` or `output.column`"
                )
        if self.incremental and self.input.id_column is None:
            raise ValueError("`incremental` needs `input.id_column`: rows are told apart by it")
        if self.validation.min_accuracy is not None and not (
            self.input.truth and isinstance(self.task, ChoiceTask)
        ):
            raise ValueError("`validation.min_accuracy` needs `input.truth` and `task.type: choice`")
        if self.gate.min_accuracy is not None and not (
            self.input.truth and isinstance(self.task, ChoiceTask)
        ):
            raise ValueError("`gate.min_accuracy` needs `input.truth` and `task.type: choice`")
        if self.judge is not None and isinstance(self.task, EmbedTask):
            raise ValueError("`judge` is not for `task.type: embed`: it reads answers")
        return self

    @model_validator(mode="after")
    def _limits_can_be_broken(self, info: ValidationInfo) -> Self:
        """A limit that nothing measures would pass for one that holds."""
        if _is_stored(info):
            return self
        for name, limit in self.gate:
            unset = (None, GateSpec.model_fields[name].default)
            if self.pilot is None and name != "min_judge_pass" and limit not in unset:
                raise ValueError(f"`gate.{name}` needs `pilot`, the sample that it judges")
        if self.gate.min_judge_pass is not None and self.judge is None:
            raise ValueError("`gate.min_judge_pass` needs `judge`")
        if self.gate.max_cost is not None and (self.cost is None or self.cost.free):
            raise ValueError("`gate.max_cost` needs `cost`, the prices")
        if self.gate.max_refusal_fraction is not None and not isinstance(self.task, GenerateTask):
            raise ValueError("`gate.max_refusal_fraction` is for `task.type: generate`")
        if isinstance(self.task, EmbedTask):
            limits = {f"gate.{name}": limit for name, limit in self.gate}
            limits |= {f"line.{name}": limit for name, limit in self.line}
            for path in _LIMITS_ON_TEXT:
                if limits[path] is not None:
                    raise ValueError(f"`{path}` is not for `task.type: embed`: it reads answers")
        return self

    @model_validator(mode="after")
    def _windows_make_an_answer(self, info: ValidationInfo) -> Self:
        """What the answers to a row's windows are joined to is checked by nobody."""
        task, combine = self.task.type, self.overlong.combine
        if self.overlong.policy != "split" or _is_stored(info):
            return self
        fitting = _COMBINATIONS.get(task)
        if fitting is None:
            raise ValueError(
                f"`overlong.policy: split` is not for `task.type: {task}`: use `truncate` or `reject`"
            )
        if combine not in fitting:
            raise ValueError(
                f"`overlong.policy: split` with `task.type: {task}` needs `overlong.combine: "
                f"{'` or `'.join(fitting)}` (got `{combine}`)"
            )
        return self

    @property
    def carried(self) -> list[str]:
        """Input columns copied to the results: `input.carry`, and the truth column if there is one."""
        extra = [self.input.truth] if self.input.truth and self.input.truth not in self.input.carry else []
        return [*self.input.carry, *extra]

    @classmethod
    def parse(cls, data: Mapping[str, Any], *, stored: bool = False) -> Self:
        """Validate a mapping.

        Args:
            data: the spec's fields.
            stored: they come from a run's plan, see `FROM_STORE`.

        Raises:
            SpecError: with one line per fault: the field's path, what is wrong, what is allowed.
        """
        try:
            return cls.model_validate(dict(data), context=FROM_STORE if stored else None)
        except ValidationError as error:
            raise SpecError(_explain(error)) from error

    def dump(self) -> dict[str, Any]:
        """The spec as JSON values, complete with defaults; `parse(dump())` gives it back."""
        data: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return data

    def to_yaml(self) -> str:
        """The spec as YAML, complete with defaults."""
        return yaml.dump(self.dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Escapes Unicode's own line breaks: written as they are, YAML reads them back as `\\n`."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """A text, in double quotes if it needs escapes."""
        style = '"' if _LINE_BREAKS & set(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_LINE_BREAKS = frozenset("\x85\u2028\u2029")
_Dumper.add_representer(str, _Dumper.represent_text)


def _unstorable(value: Any, path: str = "") -> str | None:
    """What no plan, path or column can hold, and where it stands; none if all is well."""
    where = f"`{path}` holds " if path else "a name holds "
    match value:
        case str():
            if "\0" in value:
                return f"{where}the character NUL"
            if any("\ud800" <= c <= "\udfff" for c in value):
                return f"{where}half of a surrogate pair (such as \\ud800), which is no character"
        case int() if not -(2**63) <= value < 2**63:
            return f"{where}a number beyond 64 bits"
        case Mapping():
            inner = [(name, f"{path}.{name}".lstrip(".")) for name in value]
            return next(filter(None, (_unstorable(n) or _unstorable(value[n], at) for n, at in inner)), None)
        case list() | tuple():
            return next(filter(None, (_unstorable(v, f"{path}.{i}") for i, v in enumerate(value))), None)
    return None


def _explain(error: ValidationError) -> str:
    """One line per fault, with a suggestion for a mistyped field name."""
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(p) for p in fault["loc"] if p not in _NO_FIELDS) or "spec"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            allowed = _allowed_fields(fault["loc"][:-1])
            close = difflib.get_close_matches(str(fault["loc"][-1]), allowed, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            message = f"unknown field{hint}" + (f" (allowed: {', '.join(allowed)})" if allowed else "")
        elif "storage_options" in fault["loc"]:
            pass  # whatever stands there may be somebody's secret
        elif fault["type"] != "value_error" and not isinstance(fault["input"], (dict, list)):
            message = f"{message} (got {_shown(fault['input'])})"
        lines.append(f"{path}: {message}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


_SHOWN_CHARACTERS = 200
_NO_FIELDS = frozenset({"generate", "choice", "json", "regex", "embed", "[key]"})
"""What Pydantic puts into a fault's path besides fields: tags of unions, and a mark for a mapping's key."""


def _allowed_fields(loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model at `loc` in a `JobSpec`; empty where that is no model."""
    schema = _schema()
    node: dict[str, Any] = schema
    for step in loc:
        node = _resolve(schema, node)
        if isinstance(step, int):
            node = node.get("items", {})
        elif "discriminator" in node:
            node = {"$ref": node["discriminator"]["mapping"].get(step, "")}
        else:
            node = node.get("properties", {}).get(step, {})
    return sorted(_resolve(schema, node).get("properties", {}))


@cache
def _schema() -> dict[str, Any]:
    return JobSpec.model_json_schema()


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follow `$ref`, and the one non-null branch of an optional field."""
    while True:
        branches = [b for b in node.get("anyOf", []) if b.get("type") != "null"]
        if "$ref" in node:
            node = schema["$defs"].get(node["$ref"].rsplit("/", 1)[-1], {})
        elif len(branches) == 1:
            node = branches[0]
        elif len(branches) == 2 and any(b.get("type") == "array" for b in branches):
            node = next(b for b in branches if b.get("type") == "array")
        else:
            return node
