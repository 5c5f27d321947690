"""Products whose rows do not depend on how many there are, on this processor and on lesser ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

# In a process of its own: oneDNN looks at the processor once.
ROWS = """
import numpy as np
from engine.backends.mxnet.gpt2 import product
from engine.backends.mxnet.rows import padded, row_counts
from common.mxnet_compat import mx

most = row_counts()[-1]
assert most > 10

rng = np.random.default_rng(0)
for units, size in ((768, 1152), (1536, 768), (768, 1563), (36, 54), (64, 501)):
    weight, bias = (mx.nd.array(rng.standard_normal(s)) for s in ((size, units), (size,)))
    x = rng.standard_normal((most, units))
    def rows(which):
        filled = np.resize(which, padded(len(which)))
        return product(mx.nd.array(x[filled]), weight, bias).asnumpy()[: len(which)]
    alone = np.concatenate([rows([i]) for i in range(most)])
    expected = x @ weight.asnumpy().T + bias.asnumpy()
    np.testing.assert_allclose(alone, expected, atol=1e-3, rtol=0)
    for count in range(1, most + 1):
        which = rng.permutation(most)[:count]
        np.testing.assert_array_equal(rows(which), alone[which], f"{count} of {units} x {size}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["ALL", "AVX512_CORE", "AVX2", "SSE41"])
def test_a_row_of_a_product_is_the_same_with_any_number_of_others(isa: str) -> None:
    environment = os.environ | {"DNNL_MAX_CPU_ISA": isa}
    command = [sys.executable, "-W", "ignore", "-c", ROWS]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
