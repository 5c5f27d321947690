"""Does ahead of the first model of a shape what all models of it need once."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from engine.artifacts.config import GPT2Config
from engine.backends.onnx import frames
from engine.backends.onnx.cpu import TRIED, OnnxModel
from engine.prepared.cache import Prepared
from engine.prepared.folder import own_folder
from engine.prepared.frame import build_frame, read_frame
from engine.prepared.kept import build_limits
from engine.prepared.manifest import NICENESS, Run
from engine.prepared.prune import in_use


def warm_up(config: GPT2Config, precision: str, cache_dir: Path | None, run: Run) -> None:
    """Opens a frame for `config` and keeps it for the first model of that shape.

    Raises `OSError` where nothing can be written, what `run` does, and `OutOfMemory`.
    """
    folders = [folder for folder in (cache_dir, own_folder()) if folder is not None]
    if not folders:
        raise OSError("no temporary files can be written")
    with ExitStack() as stack:
        stack.enter_context(frames.opened_ahead((config, precision)))
        if cache_dir is not None:
            stack.enter_context(in_use(cache_dir))
        frame = run(
            build_frame,
            dataclasses.asdict(config),
            precision,
            [str(folder) for folder in folders],
            what="a blank model",
            limits=build_limits(4 * config.num_parameters, NICENESS),
        )
        files = read_frame(Path(frame))
        if files.hides:  # it shows one model only
            return
        # Any weights will do to find out in which order the kernels add up. None of the head's,
        # which is the longest: it has no keys and values.
        rng = np.random.default_rng(0)
        numbers = rng.uniform(-0.05, 0.05, files.plain_bytes // 4).astype(np.float32)
        tokens = np.resize(numbers, (TRIED, config.units))
        with tempfile.NamedTemporaryFile(dir=folders[-1]) as file:
            file.write(numbers.tobytes())
            file.truncate(max(files.lengths))
            pieces = [(Path(file.name), 0, length) for length in files.lengths]
            OnnxModel(config, Prepared(files, tokens, tokens, 0, pieces)).close()
