"""Errors a user can act on. Each says what is wrong, where, and what to do about it.

`exit_code` is what the worker process and the command line exit with. The codes follow
`sysexits.h` where one fits, so that a person reading a pod's status can look them up.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a worker's exit means; one meaning each (see docs/failures.md)."""

    COMMITTED = 0
    """Every shard it owned has a commit."""
    BAD_SPEC = 64
    """The job cannot work as written (EX_USAGE): retrying is useless."""
    BAD_INPUT = 65
    """The shard's input is missing or damaged (EX_DATAERR)."""
    ENGINE_FAILED = 70
    """The engine could not start, died more often than its budget allows, did not end, or takes no request of
    the job's (EX_SOFTWARE)."""
    STORE_FAILED = 74
    """The store could not be read or written (EX_IOERR): retrying may help."""
    RECLAIMED = 75
    """Told to go (SIGTERM), or another attempt is at its shards; it checkpointed first (EX_TEMPFAIL)."""
    STOPPED = 76
    """A stop marker or the worker's own gate stopped the line: a person has to look."""
    OTHER_RELEASE = 78
    """What it reads was written by another release of this package (EX_CONFIG): use one on both sides."""


class BatchInferError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code: ExitCode = ExitCode.ENGINE_FAILED


class SpecError(BatchInferError):
    """The job is not valid: names the field's path, what it holds and what is allowed."""

    exit_code = ExitCode.BAD_SPEC


class InputError(BatchInferError):
    """The input cannot be used: names the file, column or row, and the remedy."""

    exit_code = ExitCode.BAD_INPUT


class StoreError(BatchInferError):
    """The store cannot be read or written: names the path and the operation."""

    exit_code = ExitCode.STORE_FAILED


class PlanChangedError(SpecError):
    """A run's plan exists, and the job has since changed in a field that decides results."""


class UnreadableError(InputError):
    """A stored object is there and cannot be understood."""


class CorruptError(UnreadableError):
    """A stored object does not hold what its writer promised: names the object."""


class ReleaseError(UnreadableError):
    """A stored object is whole, and was written by a release that this one does not understand: names both.

    It is no proof that something is missing or damaged, so nothing is sent again because of it.
    """

    exit_code = ExitCode.OTHER_RELEASE


class EngineError(BatchInferError):
    """The engine could not start or cannot go on."""


class AccessError(BatchInferError):
    """A server takes no request of the job's, so no row is to blame: names address, answer and remedy."""


class WorkerLostError(BatchInferError):
    """A worker is gone without a commit: killed, crashed, or reclaimed too often."""


class IncompleteRunError(BatchInferError):
    """A shard has no commit, or the sums differ: names shards, rows missing and what to clear."""


class StaleLedgerError(BatchInferError):
    """The ledger was written before a commit that readers would now choose: clear reconcile."""


class GateError(BatchInferError):
    """The run's results are held back: names the limit, the measure and examples."""

    exit_code = ExitCode.STOPPED
