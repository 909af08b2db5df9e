"""Integrity: whether the objects a commit names still are what the commit says.

A commit whose parts do not verify is not a commit: reconcile, or a worker of the shard, withdraws it, and
only the rows that were lost are sent again.
"""

from __future__ import annotations

import hashlib
import logging

from airflow_batchinfer.errors import StoreError
from airflow_batchinfer.run.commit import Commit, chosen_commit
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 1024 * 1024


def file_problem(store: Store, key: str, size: int, sha256: str) -> str | None:
    """What is wrong with a file that was once stored, naming it; none if all of it is still there.

    Args:
        store: where.
        key: of the file.
        size: its bytes, as plan or commit have them.
        sha256: the same, hex.

    Raises:
        StoreError: the store cannot be read, which says nothing about the file.
    """
    filesystem, root = store.filesystem()
    uri = store.uri_of(key)
    try:
        digest, found = hashlib.sha256(), 0
        with filesystem.open_input_stream(f"{root}/{key}", compression=None, buffer_size=None) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                found += len(chunk)
    except FileNotFoundError:
        return f"{uri} is missing"
    except OSError as error:
        raise StoreError(f"cannot read {uri}: {error}") from error
    if found != size:
        return f"{uri} has {found} bytes, and had {size} when it was written"
    if digest.hexdigest() != sha256:
        return f"{uri} has changed since it was written (its SHA-256 differs)"
    return None


def commit_problems(store: Store, commit: Commit) -> list[str]:
    """What is wrong with a commit's parts; empty if all verify. Reads each part once, in a stream."""
    found = (file_problem(store, part.key, part.bytes, part.sha256) for part in commit.parts)
    return [problem for problem in found if problem]


def sound_commit(store: Store, layout: RunLayout, shard: int, fingerprint: str) -> Commit | None:
    """The shard's commit by the readers' rule, if its parts verify; damaged ones are withdrawn first.

    For whoever is about to work on the shard: what is lost is sent again only after this says so.
    """
    while (commit := chosen_commit(store, layout, shard, fingerprint)) is not None:
        problems = commit_problems(store, commit)
        if not problems:
            return commit
        log.warning("commit %s of shard %d is withdrawn: %s", commit.epoch, shard, "; ".join(problems))
        withdraw_commit(store, layout, commit)
    return None


def withdraw_commit(store: Store, layout: RunLayout, commit: Commit) -> None:
    """Take an unsound commit out of every reader's sight; a copy stays beside it for people.

    Only for a commit with problems: readers choose among the rest from now on.
    """
    withdrawn = f"{layout.attempt(commit.shard, commit.epoch)}/commit.withdrawn.json"
    commit.write(store, withdrawn)
    store.delete(layout.commit(commit.shard, commit.epoch))
