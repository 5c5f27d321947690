"""Importing a model's script, with its own folder on the path of its own process."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from common.errors import ArtifactError

logger = logging.getLogger(__name__)

REPOSITORY = str(Path(__file__).resolve().parents[2])
COMPAT = str(Path(__file__).resolve().parents[2] / "compat")
OURS = ("common", "engine", "handlers", "serving", "tests", "scripts")


def set_path(folders: Sequence[str], packages: str | None) -> None:
    """Python's own modules, then the model's, then the packages of the model and the image."""
    paths = sysconfig.get_paths()
    own = [entry for entry in sys.path if entry != REPOSITORY]
    standard = {paths["stdlib"], paths["platstdlib"]}
    first = [e for e in own if e in standard or e.endswith((".zip", "lib-dynload"))]
    rest = [e for e in own if e not in first]
    added = [packages] if packages else []
    sys.path[:] = [*first, *folders, *added, COMPAT, *rest, REPOSITORY]
    # What the script starts finds the model's modules, too.
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *added, COMPAT])
    for folder in folders:
        _look_for_hidden(Path(folder))


def _look_for_hidden(folder: Path) -> None:
    names = {path.stem for path in folder.glob("*.py")}
    names |= {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    for name in sorted(names & sys.stdlib_module_names):
        logger.warning("%s is hidden by Python's own module of that name", folder / f"{name}.py")
    # The model's modules go before ours of the same name.
    _hidden.update({name: _taken(name) for name in (names & set(OURS)) - _hidden.keys()})


_hidden: dict[str, dict[str, ModuleType]] = {}  # packages of ours, each with its modules


def _taken(package: str) -> dict[str, ModuleType]:
    """Its modules, which are loaded no more."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in loaded}


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """What is imported inside is ours, whatever names the model's modules have."""
    theirs = {package: _taken(package) for package in _hidden}
    for modules in _hidden.values():
        sys.modules.update(modules)
    sys.path.insert(0, REPOSITORY)
    try:
        yield
    finally:
        sys.path.remove(REPOSITORY)
        for package, modules in theirs.items():
            _hidden[package] = _taken(package)
            sys.modules.update(modules)


def import_script(file: str) -> ModuleType:
    """The module in `file`, under the file's name. Raises what it raises."""
    name = Path(file).stem
    if name in sys.stdlib_module_names or name in sys.modules:
        name = f"model_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
