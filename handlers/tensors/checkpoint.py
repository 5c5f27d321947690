"""Reads MXNet symbol checkpoints, the files of `Module.save_checkpoint("model", 0)`.

model-symbol.json, model-0000.params
model-shapes.json                       [{"shape": [1, 2], "name": "data"}]
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, InvalidRequest
from common.json_body import read_json
from common.model_files import SYMBOL
from common.mxnet_compat import mx
from handlers.tensors.files import SHAPES

# Operators that call Python code or take addresses of memory.
REFUSED_OPERATORS = {"Custom", "_npi_Custom", "_Native", "_NDArray", "_CustomFunction"}

Shapes = dict[str, tuple[int, ...]]


def data_shapes(folder: Path) -> Shapes:
    """Read the shapes in `model-shapes.json`, by input. Raises `ArtifactError`."""
    try:
        rows = read_json((folder / SHAPES).read_bytes(), source=SHAPES)
        shapes = {row["name"]: tuple(row["shape"]) for row in rows}
        right = bool(shapes) and all(
            isinstance(name, str) and shape and all(type(n) is int and n > 0 for n in shape)
            for name, shape in shapes.items()
        )
    except (InvalidRequest, KeyError, TypeError):
        right = False
    if not right:
        raise ArtifactError(f'{SHAPES} must be like [{{"shape": [1, 2], "name": "data"}}]')
    return shapes


def load_symbol(folder: Path, shapes: Shapes) -> Any:
    """Load the graph and check that it has the inputs `shapes`. Raises `ArtifactError`."""
    text = (folder / SYMBOL).read_text(encoding="utf-8", errors="replace")
    operators: set[str] = set()

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Collect operators, also of nodes' subgraphs (such as `_foreach`'s) and duplicate keys."""
        operators.update(value for key, value in pairs if key == "op")
        return dict(pairs)

    try:
        json.loads(text, object_pairs_hook=collect)["nodes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArtifactError(f"{SYMBOL} is not the JSON of an MXNet symbol") from None
    refused = sorted(operators & REFUSED_OPERATORS)
    if refused:
        raise ArtifactError(
            f"{SYMBOL} has the operator {refused[0]}, which runs code or uses addresses of"
            " memory: load the model in code/inference.py"
        )
    try:
        symbol = mx.sym.load_json(text)
    except mx.MXNetError as error:
        raise ArtifactError(f"{SYMBOL} cannot be loaded: {reason(error)}") from None
    arguments = symbol.list_arguments()
    for name in shapes:
        if name not in arguments:
            raise ArtifactError(
                f"{SHAPES} names {name}, but {SYMBOL} takes {', '.join(arguments)[:300]}"
            )
    return symbol


def reason(error: Exception) -> str:
    """Shorten MXNet's error message to one line, without C++ stack trace and source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    texts = [
        line for line in lines if line and not line.startswith(("Stack trace", "[bt]", "File"))
    ]
    text = (texts or ["unknown"])[-1].removeprefix("MXNetError: ")
    text = re.sub(r"(Error in operator [^:]*: )?\[[\d:]+\] \S+:\d+: ", "", text)
    return re.sub(r"Check failed: [^:]*(::[^:]*)*: (?=.)", "", text)[:300]
