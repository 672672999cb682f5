"""What one question to the classifier costs, over shapes of errors as clients raise them. Needs no server."""

from __future__ import annotations

import statistics
import timeit
from datetime import UTC, datetime
from functools import partial

from airflow_runguard.core.failures import classify
from demo.error_shapes import SHAPES

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)


def classify_us(repeat: int = 200) -> float:
    """Microseconds: the median over the shapes, of each the best of many, which a busy machine does not blur."""
    best = [min(timeit.repeat(partial(classify, error, now=NOW), number=1, repeat=repeat)) for _, error, _ in SHAPES]
    return statistics.median(best) * 1e6
