"""`python -m airflow_batchinfer.worker`: runs shards and exits with an `ExitCode`."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from airflow_batchinfer.errors import BatchInferError
from airflow_batchinfer.worker.run import run_worker
from airflow_batchinfer.worker.settings import parse_arguments

_BUG = 1
"""Exit code of an error that this package did not foresee."""


def main() -> int:
    """Run the worker; the last line on stderr says why it ended, if not well."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each row that a server answers
    try:
        return int(run_worker(parse_arguments(sys.argv[1:]), _say))
    except BatchInferError as error:
        _say(str(error))
        return int(error.exit_code)
    except Exception as error:
        logging.getLogger(__name__).exception("the worker failed")
        _say(f"internal error: {type(error).__name__}: {error}")
        return _BUG


def leave(code: int) -> NoReturn:
    """End the process without Python's own shutdown, which may never end, or abort.

    A thread that is inside Arrow when the interpreter goes holds it up for ever, or is unwound through
    C++ ("terminate called without an active exception"). Besides, taking torch apart costs seconds in which
    the accelerator is held. All that matters is durable by now.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(message: str) -> None:
    print("batchinfer:", "; ".join(message.splitlines()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main())
