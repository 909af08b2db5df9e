"""Which failures Airflow may try again, and what it says about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy

from airflow_batchinfer.errors import BatchInferError, EngineError, StoreError, WorkerLostError

if TYPE_CHECKING:
    from airflow.sdk import Context

_WORTH_A_RETRY: dict[type[BatchInferError], str] = {
    WorkerLostError: "worker lost",
    EngineError: "engine failed",
    StoreError: "store failed",
}


def retry_name(exception: BaseException) -> str | None:
    """Short name of a failure that another attempt may get past; none for the rest."""
    return next((name for kind, name in _WORTH_A_RETRY.items() if isinstance(exception, kind)), None)


class FailureRetryPolicy(RetryPolicy):
    """Retry what may pass (a lost worker, the engine, the store); fail at once what stays wrong.

    A bad spec, bad input, an incomplete run or a closed gate gives the same answer every time, so
    retries would only delay the message. Exceptions that are not ours are left to Airflow.
    """

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """Decide by the exception's type; the reason is what the task instance shows."""
        name = retry_name(exception)
        if name is not None:
            return RetryDecision.retry(reason=f"{name}: {exception}")
        if isinstance(exception, BatchInferError):
            return RetryDecision.fail(reason=str(exception))
        return RetryDecision.default()

    def serialize(self) -> dict[str, Any]:
        """The policy has no settings."""
        return {}
