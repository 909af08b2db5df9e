"""How an infer task reads in Airflow's UI while it runs and after it has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_batchinfer.errors import BatchInferError
from airflow_batchinfer.operators.bundle import LABEL_VARIABLE, Bundle, label
from airflow_batchinfer.operators.retry import retry_name

if TYPE_CHECKING:
    from airflow.sdk import Context


@contextmanager
def labelled(context: Context, bundle: Bundle) -> Iterator[None]:
    """Name the mapped task after its bundle; append the kind of error that ends it."""
    variables: dict[str, Any] = context  # type: ignore[assignment]  # a TypedDict, open at run time
    variables[LABEL_VARIABLE] = label(bundle)
    try:
        yield
    except BatchInferError as error:
        variables[LABEL_VARIABLE] = f"{label(bundle)} · {retry_name(error) or type(error).__name__}"
        raise
