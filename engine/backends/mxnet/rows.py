"""How many rows a decode step has, so that a row's logits do not depend, not in a bit, on them.

oneDNN chooses a kernel for an fp32 product by its number of rows, and another for what is left over
behind whole tiles; each adds up in its own order. With AVX-512 that is one for 1 row, one for 2 to
15, one for more; with AVX2 a row that is the 7th of 7 is not what it is as the 4th of 4. So that
the same seed gives the same text whoever else is in the batch, a decode step has only numbers of
rows that agree, filled up with some that nobody reads.
"""

from __future__ import annotations

import collections
import functools

import numpy as np

from common.mxnet_compat import mx

# The kernel for more is slow with few. This one is as fast with two rows as the one for 1 is with
# one, and makes as many tokens a second with 15 as that for more with 16.
MOST_ROWS = 15


@functools.cache
def row_counts() -> tuple[int, ...]:
    """The most row counts, ascending, of which this processor's kernels agree; found by trying."""
    rng = np.random.default_rng(0)
    weight = mx.nd.array(rng.standard_normal((96, 64)))
    row = rng.standard_normal((1, 64))
    agree: dict[bytes, list[int]] = collections.defaultdict(list)
    for count in range(1, MOST_ROWS + 1):
        x = mx.nd.array(row.repeat(count, axis=0))
        y = mx.nd.FullyConnected(x, weight, num_hidden=len(weight), no_bias=True).asnumpy()
        if (y == y[0]).all():
            agree[y[0].tobytes()].append(count)
    most: list[int] = max(agree.values(), key=len)
    return tuple(most)


def padded(rows: int) -> int:
    """With how many rows a decode step of `rows` rows, at most `row_counts`' last, is computed."""
    return next(count for count in row_counts() if count >= rows)
