"""Opens a model's folder, or its archive unpacked as the server unpacks it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from command.errors import Problem
from common.errors import ServiceError
from common.model_files import is_hidden
from serving.settings import Settings
from serving.store.archive import extract

# Caches, and the state of transformers' Trainer, which is twice a model's size.
LEFT_OUT = ["__pycache__", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"]
LEFT_OUT += ["rng_state*.pth", "trainer_state.json", "training_args.bin"]


@contextlib.contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """Yield `path`, or a temporary folder with its archive's files. Raises `Problem`."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kogpt2-") as work:
        folder = Path(work, path.name)
        folder.mkdir()
        try:
            with path.open("rb") as file:
                extract(file, folder, path.name, Settings.model_max_mib << 20)
        except FileNotFoundError:
            raise Problem(f"{path} does not exist: give a model's folder or archive") from None
        except OSError as error:
            raise Problem(f"{path} cannot be read: {error.strerror}") from None
        except ServiceError as error:
            raise Problem(error.message) from None
        yield folder


def belongs(path: Path) -> bool:
    """Whether a file or folder is part of the model, neither hidden nor of `LEFT_OUT`."""
    return not (is_hidden(path.name) or any(fnmatch(path.name, p) for p in LEFT_OUT))
