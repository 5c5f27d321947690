"""Imports a model's script, with the model's folders on `sys.path` of the script's process."""

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
from common.model_files import visible

logger = logging.getLogger(__name__)

REPOSITORY = str(Path(__file__).resolve().parents[2])
COMPAT = f"{REPOSITORY}/compat"
SERVER_PACKAGES = ("common", "engine", "handlers", "serving", "tests", "scripts")


def set_path(folders: Sequence[str], packages: str | None) -> None:
    """Set `sys.path`: standard library, model, its packages, the image's, the server's modules."""
    paths = sysconfig.get_paths()
    own = [entry for entry in sys.path if entry != REPOSITORY]
    standard = {paths["stdlib"], paths["platstdlib"]}
    first = [e for e in own if e in standard or e.endswith((".zip", "lib-dynload"))]
    rest = [e for e in own if e not in first]
    added = [packages] if packages else []
    sys.path[:] = [*first, *folders, *added, COMPAT, *rest, REPOSITORY]
    # Processes that the script starts use the same folders.
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *added, COMPAT])
    for folder in folders:
        _shadow_server_packages(Path(folder))


def _shadow_server_packages(folder: Path) -> None:
    """Unload the server's packages whose names modules of the model have as well."""
    names = {path.stem for path in visible(folder, "*.py")}
    names |= {path.name for path in visible(folder) if (path / "__init__.py").is_file()}
    for name in sorted(names & sys.stdlib_module_names):
        logger.warning(
            "%s is never imported: the standard library has a module of that name",
            folder / f"{name}.py",
        )
    _shadowed.update(
        {name: _unload(name) for name in (names & set(SERVER_PACKAGES)) - _shadowed.keys()}
    )


# The server's packages that the model's modules shadow -> the modules loaded of each.
_shadowed: dict[str, dict[str, ModuleType]] = {}


def _unload(package: str) -> dict[str, ModuleType]:
    """Remove the package's modules from `sys.modules`; return them."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in loaded}


@contextlib.contextmanager
def server_imports() -> Iterator[None]:
    """Import the server's packages in the block, even if modules of the model have their names."""
    models = {package: _unload(package) for package in _shadowed}
    for modules in _shadowed.values():
        sys.modules.update(modules)
    sys.path.insert(0, REPOSITORY)
    try:
        yield
    finally:
        sys.path.remove(REPOSITORY)
        for package, modules in models.items():
            _shadowed[package] = _unload(package)
            sys.modules.update(modules)


def import_script(file: str) -> ModuleType:
    """Import `file` under the file's name. Raises what the script raises."""
    name = Path(file).stem
    if name in sys.stdlib_module_names or name in sys.modules:
        name = f"model_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{file} is no Python file, must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
