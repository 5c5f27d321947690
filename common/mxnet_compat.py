"""Imports MXNet 1.9.1 on numpy 1.26: `from common.mxnet_compat import mx`, never `import mxnet`.

MXNet uses six numpy aliases of Python's own types that numpy 1.24 removed. They are put back where
they are missing. numpy 2 cannot be helped this way: `PZERO` and others that MXNet needs are gone.
"""

from __future__ import annotations

import os
from typing import Any

from common import numpy_aliases
from common.cpus import cpu_count
from common.errors import InvalidRequest

numpy_aliases.restore()

# One worker thread of MXNet's engine per core: its fp32 matrix product keeps one core busy, and
# engine.backends.mxnet.gpt2 splits each weight so that as many products run side by side.
CPU_WORKERS = min(cpu_count(), 8)
os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(CPU_WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import mxnet as _mxnet
except ModuleNotFoundError:
    raise InvalidRequest(
        "there is no MXNet in this image: take the one that `scripts/build cpu` makes,"
        " or ENGINE_BACKEND=native and a model that it can run"
    ) from None

mx: Any = _mxnet
