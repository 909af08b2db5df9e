"""`StopRunOperator` and `ResumeRunOperator`: the brake of a run, for DAGs that watch over others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow_batchinfer.operators.base import BatchInferOperator
from airflow_batchinfer.operators.job import needed_store
from airflow_batchinfer.run.plan import check_is_run
from airflow_batchinfer.run.stop import clear_stop, set_stop
from airflow_batchinfer.store import Store, open_store

if TYPE_CHECKING:
    from airflow.sdk import Context


class _BrakeOperator(BatchInferOperator):
    """A run in a store, named by its folder, which may be a template or another task's output."""

    template_fields: Collection[str] = ("folder",)

    def __init__(
        self,
        *,
        folder: str,
        store: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.store = store
        self.folder = folder
        self.storage_options = dict(storage_options or {})

    def open_store(self) -> Store:
        """The store. Raises `InputError` if the folder holds no run, `SpecError` if nothing names a store."""
        self.use_store_connection()
        store = open_store(self.store or needed_store(), self.storage_options)
        check_is_run(store, self.folder)
        return store


class StopRunOperator(_BrakeOperator):
    """Set a run's stop marker: its workers checkpoint and exit, and new ones exit at once.

    Args:
        folder: the run's folder in the store, `<job>/runs/<run>`. Templated: a DAG finds it at run time.
        store: the store's address; default: `[batchinfer] store`.
        reason: shown to whoever finds the run stopped.
        storage_options: see the job spec's.
    """

    def __init__(self, *, reason: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def execute(self, context: Context) -> None:
        """Set the marker; one that stands stays. Raises `InputError`, `StoreError`."""
        by = f"task {context['ti'].task_id} of DAG {context['ti'].dag_id}"
        stop = set_stop(self.open_store(), self.folder, self.reason, by)
        self.log.info(stop.advice(self.folder))


class ResumeRunOperator(_BrakeOperator):
    """Remove a run's stop marker. Its failed tasks are still to be cleared.

    Args:
        folder: the run's folder in the store, `<job>/runs/<run>`. Templated: a DAG finds it at run time.
        store: the store's address; default: `[batchinfer] store`.
        storage_options: see the job spec's.
    """

    def execute(self, context: Context) -> bool:
        """Whether there was a marker. Raises `InputError`, `StoreError`."""
        return clear_stop(self.open_store(), self.folder)
