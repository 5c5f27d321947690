"""Many deltas of one random base, as folders without weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from command.documents import write_json
from common.model_files import BASE_NAME, DELTA
from engine.artifacts.artifact import CONFIG_FILE
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.open import open_artifact
from engine.artifacts.read_safetensors import read_safetensors
from engine.artifacts.tensor_index import map_index
from engine.native.delta import VERSION, choices_of, layout, open_delta
from engine.native.prepared import save_arrays
from testbed import random_model
from testbed.folders import building


def make(store: Path, config: GPT2Config, count: int) -> Iterator[Path]:
    """Yield the folders of `count` deltas, each with files of its own; their base is in `store`.

    Each is written when the iterator reaches it, unless it exists. A fine-tune and its delta take
    some seconds, so all are of one; their positions are in other orders, and so they give other
    texts.
    """
    base = random_model.make(store, config, 0)
    first = store / f".delta-{config.num_layers}x{config.units}-{VERSION.replace(' ', '-')}"
    for i in range(count):
        folder = store / f"{first.name[1:]}-{i:03}"
        if not folder.is_dir():
            if not first.is_dir():
                _write_first(first, base, config)
            _write_turned(first, folder, config, i)
        yield folder


def _write_first(folder: Path, base: Path, config: GPT2Config) -> None:
    ignore = shutil.ignore_patterns("*.params")
    with tempfile.TemporaryDirectory(dir=folder.parent) as work, building(folder) as new:
        whole = next(random_model.fine_tunes_of(base, Path(work), config, 1))
        shutil.copytree(whole, new, ignore=ignore, dirs_exist_ok=True)
        config_file = new / CONFIG_FILE
        write_json(config_file, {**read_json(config_file), BASE_NAME: base.name})
        artifacts = open_artifact(whole), open_artifact(base)
        with closing(open_delta(*artifacts, Path(work))) as delta:
            shutil.copyfile(delta.file.path, new / DELTA)


def _write_turned(first: Path, folder: Path, config: GPT2Config, turn: int) -> None:
    """Write a copy with the rows of the positions in another order."""
    index, metadata, _ = read_safetensors(first / DELTA)
    arrays = map_index(first, index)
    arrays["adapter.positions"] = np.roll(arrays["adapter.positions"], turn, axis=0)
    entries = list(layout(config, choices_of(metadata), 0))
    with building(folder) as new:
        shutil.copytree(first, new, ignore=shutil.ignore_patterns(DELTA), dirs_exist_ok=True)
        save_arrays(new / DELTA, entries, metadata, arrays)
