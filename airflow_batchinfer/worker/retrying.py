"""Writes that are tried again: a lost write costs a wait, never the inference behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from airflow_batchinfer.errors import StoreError

log = logging.getLogger(__name__)

_WAIT_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


def with_retries(write: Callable[[], None]) -> None:
    """Call `write` until it succeeds, up to six times. Raises the last `StoreError`."""
    for wait in _WAIT_SECONDS:
        try:
            return write()
        except StoreError as error:
            log.warning("%s; again in %.1f s", error, wait)
            time.sleep(wait)
    write()
