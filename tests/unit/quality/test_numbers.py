"""Histograms and samples: what adds up over shards must not depend on how rows were cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.pipeline.histogram import Histogram
from airflow_batchinfer.pipeline.sampling import RowSample, sample

pytestmark = pytest.mark.airflow_env

lengths = st.lists(st.integers(0, 200_000), max_size=200)


@given(lengths, lengths)
def test_histograms_add_up(one: list[int], other: list[int]) -> None:
    together = Histogram.of(np.array(one + other, np.int64))
    assert Histogram.of(np.array(one, np.int64)).plus(Histogram.of(np.array(other, np.int64))) == together


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_right_to_a_bucket(values: list[int], q: float) -> None:
    found = Histogram.of(np.array(values, np.int64)).quantile(q)
    exact = float(np.quantile(np.array(values), q, method="inverted_cdf"))
    assert abs(found - exact) <= exact / 8 + 1


@given(st.integers(1, 50), st.integers(0, 5), st.integers(1, 7))
def test_sample_of_shards_is_the_sample_of_the_run(size: int, seed: int, shards: int) -> None:
    rows = np.arange(1000)
    whole = set(sample(rows, size, seed).tolist())
    drawn = RowSample(size, seed)
    for tag, part in enumerate(np.array_split(rows, shards)):
        drawn.add(part, tag)
    assert {i for ids in drawn.by_tag().values() for i in ids.tolist()} == whole


def test_sample_is_spread_evenly() -> None:
    drawn = sample(np.arange(100_000), 10_000, seed=3)
    tenths, _ = np.histogram(drawn, bins=10, range=(0, 100_000))
    assert tenths.min() > 850
    assert tenths.max() < 1150
