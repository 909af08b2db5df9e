"""Buckets of rows: cut by their bytes, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from airflow_batchinfer.pipeline import buckets
from airflow_batchinfer.pipeline.buckets import Buckets, side_by_side

pytestmark = pytest.mark.airflow_env

LIMIT = 100_000


def filled(scratch: Path, by: str, ids: list[int], size: int) -> Buckets:
    """Rows with these ids, in a shuffled order and in several batches, each of about `size` bytes."""
    found = Buckets(scratch, pa.schema([(by, pa.int64()), ("text", pa.string())]), by)
    order = np.random.default_rng(1).permutation(ids).tolist()
    for first in range(0, len(order), 7):
        some = order[first : first + 7]
        found.add(
            pa.record_batch([pa.array(some, pa.int64()), [f"{i:0{size}d}" for i in some]], found.schema)
        )
    found.finish()
    return found


def test_a_bucket_of_large_rows_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", LIMIT)
    ids = list(range(-20, 180))
    one, other = filled(tmp_path, "id", ids, 10_000), filled(tmp_path, "prior", ids[10:], 5_000)
    pairs = list(side_by_side([one, other]))
    assert all(sum(t.nbytes for t in pair) <= LIMIT or pair[0].num_rows == 1 for pair in pairs)
    assert len(pairs) < len(ids), "a bucket holds as many rows as fit"
    found = [[sorted(t.column(0).to_pylist()) for t in pair] for pair in pairs]
    assert [i for wanted, _ in found for i in wanted] == ids, "the ranges follow one another"
    assert [i for _, beside in found for i in beside] == ids[10:]
    assert all(set(beside) <= set(wanted) for wanted, beside in found)
    assert len(list(one.folder.iterdir())) == 1, "what was cut is gone again"


def test_small_rows_stay_in_one_bucket(tmp_path: Path) -> None:
    ((table,),) = side_by_side([filled(tmp_path, "id", list(range(200)), 10)])
    assert table.num_rows == 200
