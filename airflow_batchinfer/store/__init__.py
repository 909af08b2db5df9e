"""Where a job's data lives: one small protocol, a local folder and S3 behind it."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.store.address import address_problem
from airflow_batchinfer.store.base import ObjectInfo, Store
from airflow_batchinfer.store.local import LocalStore

__all__ = ["LocalStore", "ObjectInfo", "Store", "open_store"]


def open_store(uri: str, options: Mapping[str, str] | None = None) -> Store:
    """The store at a local path or `s3://bucket/prefix`.

    Args:
        uri: the root.
        options: for S3, `endpoint_url`, `region`, `addressing_style`, `sse`; credentials come from
            boto3's own chain, never from here.

    Raises:
        SpecError: no store can be at this address, or an option cannot be.
    """
    if problem := address_problem(uri):
        raise SpecError(problem)
    if uri.startswith("s3://"):
        from airflow_batchinfer.store.s3 import S3Store

        return S3Store(uri, options or {})
    return LocalStore(uri.removeprefix("file://"))
