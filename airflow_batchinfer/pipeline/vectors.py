"""Vectors in Arrow columns, measured without a loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def measure_vectors(
    vectors: pa.ChunkedArray,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Length and Euclidean norm of each vector of a list column without nulls."""
    lengths = pc.list_value_length(vectors).to_numpy().astype(np.int64)
    if not len(lengths):
        return lengths, np.empty(0)
    squares = np.square(pc.list_flatten(vectors).to_numpy().astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(squares)])
    ends = np.cumsum(lengths)
    return lengths, np.sqrt(np.maximum(sums[ends] - sums[ends - lengths], 0.0))
