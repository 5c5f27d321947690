"""Imports MXNet 1.9.1 on numpy 1.26: `from common.mxnet_compat import mx`, never `import mxnet`.

MXNet uses six aliases of Python's types that numpy 1.24 removed; they are restored. numpy 2 lacks
more that MXNet needs, such as PZERO.
"""

from __future__ import annotations

import os
from typing import Any

from common import numpy_aliases
from common.cpus import cpu_count
from common.errors import InvalidRequest

numpy_aliases.restore()

# One worker thread of MXNet's engine per core, of one OpenMP thread each: independent operators run
# at the same time, and their threads do not compete for the cores.
CPU_WORKERS = min(cpu_count(), 8)
os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", str(CPU_WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import mxnet as _mxnet
except ModuleNotFoundError:
    raise InvalidRequest(
        "there is no MXNet in this image: take the one that `scripts/build cpu` makes for"
        " x86-64, or ENGINE_BACKEND=native and a model that it can run"
    ) from None

mx: Any = _mxnet
