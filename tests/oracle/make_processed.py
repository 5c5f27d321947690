"""Has transformers' own processors change logits, as its `generate` puts them in a row.

In the oracle's environment (see make_golden):

    .venv-oracle/bin/python -m tests.oracle.make_processed CASES.json

A case has `seed`, `size` and `scale` of its logits, its `ids`, and `processors`: names, each with
what it is made with. Beside the file comes for each case a `<number>.npy`: its logits (V,) after
them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main(path: Path) -> None:
    for number, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        rng = np.random.default_rng(case["seed"])
        logits = (case["scale"] * rng.standard_normal(case["size"])).astype(np.float32)
        ids, scores = torch.tensor([case["ids"]]), torch.from_numpy(logits)[None]
        for name, arguments in case["processors"]:
            scores = getattr(transformers, name)(**arguments)(ids, scores)
        np.save(path.with_name(f"{number}.npy"), scores[0].numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
