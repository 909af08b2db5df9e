"""`PrepareReplayOperator`: plan a replay of a run's dead letters, in `split`'s place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Param

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.base import RUN_XCOM_KEY, BatchInferOperator
from airflow_batchinfer.operators.bundle import Bundle, address_of, bundles_of, max_mapped_tasks
from airflow_batchinfer.operators.job import needed_store
from airflow_batchinfer.operators.split import check_conf
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec_overrides import merged
from airflow_batchinfer.store import open_store
from airflow_batchinfer.yaml_text import parse_yaml

if TYPE_CHECKING:
    from airflow.sdk import Context

_OVERRIDES = {
    "template": ("prompt", "template"),
    "system": ("prompt", "system"),
    "model": ("model", "name"),
    "revision": ("model", "revision"),
    "engine": ("model", "engine"),
    "max_tokens": ("sampling", "max_tokens"),
    "temperature": ("sampling", "temperature"),
    "overlong": ("overlong", "policy"),
    "overlong_column": ("overlong", "column"),
}
"""Fields of the job that the form can override, by param."""


def replay_params(
    job: str | None = None, store: str | None = None, storage_options: Mapping[str, str] | None = None
) -> dict[str, Param]:
    """Params of a DAG that replays dead letters.

    Args:
        job: the job's name, filled in.
        store: the store's address, filled in.
        storage_options: options of an `s3://` store, filled in.
    """
    text: dict[str, Any] = {"type": ["string", "null"]}
    return {
        "job": Param(job, type="string", title="Job", section="What", description="Its name."),
        "run": Param(
            None,
            **text,
            title="Run",
            section="What",
            description="Id of the run to repair. Empty: the newest published run.",
        ),
        "reasons": Param(
            [],
            type="array",
            items={"type": "string", "enum": [reason.value for reason in Reason]},
            examples=[reason.value for reason in Reason],
            title="Reasons",
            section="What",
            description="Only dead letters with these reasons. Empty: all.",
        ),
        "template": Param(
            None, **text, format="multiline", title="Template", section="What to change", description=_KEPT
        ),
        "system": Param(
            None,
            **text,
            format="multiline",
            title="System message",
            section="What to change",
            description=_KEPT,
        ),
        "model": Param(None, **text, title="Model", section="What to change", description=_KEPT),
        "revision": Param(None, **text, title="Revision", section="What to change", description=_KEPT),
        "engine": Param(
            None,
            type=["object", "null"],
            title="Engine options",
            section="What to change",
            description="Laid over the job's, for instance a longer `max_model_len`.",
        ),
        "max_tokens": Param(
            None,
            type=["integer", "null"],
            minimum=1,
            title="Longest answer",
            section="What to change",
            description=_KEPT,
        ),
        "temperature": Param(
            None,
            type=["number", "null"],
            minimum=0,
            maximum=2,
            title="Temperature",
            section="What to change",
            description=_KEPT,
        ),
        "overlong": Param(
            None,
            type=["string", "null"],
            enum=[None, "reject", "truncate", "split"],
            title="Prompts that do not fit",
            section="What to change",
            description=_KEPT,
        ),
        "overlong_column": Param(
            None, **text, title="Column to cut", section="What to change", description=_KEPT
        ),
        "overrides": Param(
            None,
            **text,
            format="multiline",
            title="As YAML",
            section="What to change",
            description="Any other fields of the job spec, merged over the form.",
        ),
        "store": Param(
            store,
            **text,
            title="Store",
            section="Where",
            description="Empty: `[batchinfer] store` of Airflow's configuration.",
        ),
        "storage_options": Param(
            dict(storage_options) if storage_options else None,
            type=["object", "null"],
            title="Storage options",
            section="Where",
            description="Of an `s3://` store; never credentials.",
        ),
    }


_KEPT = "Empty: as the run had it."


class PrepareReplayOperator(BatchInferOperator):
    """Plan the replay that the run's params ask for, see `replay_params`; return one bundle a task.

    Clearing it gives the same plan again. With no dead letter left, it returns no bundle, and the
    tasks behind it change nothing.
    """

    def execute(self, context: Context) -> list[Bundle]:
        """Plan the replay. Raises `SpecError`, `InputError`, `StaleLedgerError`, `StoreError`."""
        from airflow_batchinfer.pipeline.replay import prepare_replay, published_folder

        params = context["params"]
        check_conf(context["dag_run"].conf or {}, context["dag"].params)  # `params` has all keys of the conf
        address = params["store"] or needed_store()
        self.use_store_connection()
        store = open_store(address, params["storage_options"] or {})
        folder = published_folder(store, params["job"], params["run"] or None)
        plan = prepare_replay(
            store, folder, context["run_id"], reasons=params["reasons"], overrides=overrides_of(params)
        )
        for warning in plan.warnings:
            self.log.warning(warning)
        self.log.info(
            "%d dead letters of %s run again in %d shards; plan: %s",
            plan.rows,
            folder,
            len(plan.shards),
            store.uri_of(plan.folder),
        )
        context["ti"].xcom_push(key=RUN_XCOM_KEY, value=address_of(store, plan))
        return bundles_of(store, plan, max_mapped_tasks())


def overrides_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the job spec that a form's params override. Raises `SpecError`."""
    fields: dict[str, Any] = {}
    for name, (section, field) in _OVERRIDES.items():
        if params.get(name) not in (None, "", {}):
            fields.setdefault(section, {})[field] = params[name]
    try:
        more = parse_yaml(params.get("overrides") or "")
    except SpecError as error:
        raise SpecError(f"overrides: {error}") from error
    if more is None:
        return fields
    if not isinstance(more, dict):
        raise SpecError(f"overrides: give fields of the job spec, not {type(more).__name__}")
    return merged(fields, more)
