"""What Arrow raises while it reads: a store that fails, told apart from bytes that are damaged."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_batchinfer.errors import StoreError

_S3_WORDS = "AWS Error"
"""In the message of every request to S3 that failed; Arrow gives no type and no code."""


@contextmanager
def arrow_reads(uri: str) -> Iterator[None]:
    """Turn a failure of the store or the system, met while Arrow reads, into an error that may pass.

    Damage, and an object that is not there or cannot be, stay what Arrow raises: a damaged list of files may
    hold any name.

    Args:
        uri: what is read.

    Raises:
        StoreError: the read failed, which says nothing about the object.
        MemoryError: nor does this.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except MemoryError as error:  # Arrow's is an `ArrowException` too, and would pass for damage
        raise MemoryError(f"not enough memory to read {uri}: {error}") from error
    except OSError as error:
        decoding = error.errno is None and _S3_WORDS not in str(error)  # neither the system's nor S3's
        if decoding or error.errno == errno.ENAMETOOLONG:
            raise
        raise StoreError(f"cannot read {uri}: {error}") from error
