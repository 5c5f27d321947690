from __future__ import annotations

from common.histogram import Histogram


def test_a_bucket_counts_values_up_to_its_bound() -> None:
    waited = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        waited.observe(seconds)
    assert waited.describe() == {"buckets": [["0.1", 2], ["1.0", 3], ["+Inf", 4]], "sum": 7.65}
