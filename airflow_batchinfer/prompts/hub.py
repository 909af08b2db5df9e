"""Why a model's files cannot be loaded: the job names them wrongly, or the hub cannot give them now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from airflow_batchinfer.errors import EngineError

_HTTP_LIBRARIES = frozenset({"httpx", "httpx2", "requests"})
"""Those that `huggingface_hub` has used, one after another; none is a dependency of ours."""

_ASKS_TO_WAIT = frozenset({408, 429})


@contextmanager
def from_hub(field: str, name: str) -> Iterator[None]:
    """Tell a hub that is away from a model that is not there; any other error passes as it is.

    Args:
        field: of the spec, that names what is loaded.
        name: its value.

    Raises:
        EngineError: the hub cannot be reached, or has asked to come later: another attempt may help.
    """
    try:
        yield
    except Exception as error:
        if _is_away(error):
            raise EngineError(
                f"{field}: the hub cannot give `{name}` now (without it: set HF_HUB_OFFLINE=1 where the "
                f"cache holds the model, or `model.engine.max_model_len`): {error}"
            ) from error
        raise


def _is_away(error: BaseException) -> bool:
    """Whether an error comes of a hub that did not answer, or not with a final word.

    Libraries wrap it in an `OSError` or `ValueError` that reads as if the name were wrong.
    """
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in _ASKS_TO_WAIT or status >= 500
        if type(cause).__name__ == "OfflineModeIsEnabled":  # a `ConnectionError`, but the user's own wish
            return False
        library = type(cause).__module__.partition(".")[0]
        if library in _HTTP_LIBRARIES or isinstance(cause, (ConnectionError, TimeoutError)):
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised for, and so on."""
    seen: list[BaseException] = [error]
    for cause in seen:
        yield cause
        found: list[BaseException | None] = [cause.__cause__ or cause.__context__]
        if isinstance(cause, ValidationError):  # which keeps what a validator raised to itself
            found += [fault.get("ctx", {}).get("error") for fault in cause.errors(include_url=False)]
        seen += [e for e in found if isinstance(e, BaseException) and e not in seen]
