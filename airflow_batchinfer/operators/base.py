"""What the operators after `split` share: they find the run that split planned."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_batchinfer.errors import IncompleteRunError
from airflow_batchinfer.operators.bundle import RunAddress
from airflow_batchinfer.operators.retry import FailureRetryPolicy
from airflow_batchinfer.store import Store, open_store

if TYPE_CHECKING:
    from airflow.sdk import Context

RUN_XCOM_KEY = "run"
"""XCom key under which split leaves the run's `RunAddress`."""


class BatchInferOperator(BaseOperator):
    """Base of all operators here: nothing of a job is templated, retries follow `FailureRetryPolicy`.

    Airflow renders templated fields with its own Jinja and context, even values that come from XCom.
    Job specs hold the user's templates, so no field that holds a spec or rows may be one of them.
    """

    template_fields: Collection[str] = ()
    ui_color = "#e8f1f8"

    def __init__(self, *, store_conn_id: str | None = None, **kwargs: Any) -> None:
        """Take Airflow's own arguments, and the AWS connection to reach an `s3://` store with."""
        kwargs["retry_policy"] = kwargs.get("retry_policy") or FailureRetryPolicy()
        super().__init__(**kwargs)
        self.store_conn_id = store_conn_id

    def use_store_connection(self) -> None:
        """Act as `store_conn_id`, if there is one; call it before opening a store. Raises `StoreError`."""
        if self.store_conn_id is not None:
            from airflow_batchinfer.operators.store import use_connection

            use_connection(self.store_conn_id)


class RunOperator(BatchInferOperator):
    """Base of the operators that work on a whole run.

    Args:
        split_task_id: full id of the split task whose run this is.
    """

    def __init__(self, *, split_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split_task_id = split_task_id

    def open_run(self, context: Context) -> tuple[Store, str]:
        """The store, and the run's folder in it.

        Raises:
            IncompleteRunError: split left no plan.
            AirflowSkipException: nor was it to: a branch before it skipped it, and all after it.
        """
        self.use_store_connection()
        address: RunAddress | None = context["ti"].xcom_pull(
            task_ids=self.split_task_id, key=RUN_XCOM_KEY, map_indexes=-1
        )
        if address is None:
            if self._is_skipped_with_split(context):
                raise AirflowSkipException(f"`{self.split_task_id}` was skipped: there is no run")
            raise IncompleteRunError(
                f"there is no plan: `{self.split_task_id}` has not succeeded in this run. "
                f"Read its error, then clear `{self.split_task_id}` with downstream."
            )
        return open_store(address["store"], address["storage_options"]), address["folder"]

    def _is_skipped_with_split(self, context: Context) -> bool:
        """Whether split and each task from it to this one were skipped. Split's state alone is no proof that
        there was no work: one of them that ran, or failed, speaks against it."""
        since_split = context["dag"].get_task(self.split_task_id).get_flat_relative_ids(upstream=False)
        between = {self.split_task_id, *(since_split & self.get_flat_relative_ids(upstream=True))}
        ti = context["ti"]
        states = ti.get_task_states(dag_id=ti.dag_id, task_ids=sorted(between), run_ids=[ti.run_id])
        return set(states.get(ti.run_id, {}).values()) == {"skipped"}
