"""`pip install .` brings all that the packages need, not their Python alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from engine.native import library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "benchmarks", "command", "common", "compat", "deploy/sagemaker", "engine", "handlers",
    "scripts", "serving", "testbed",
)  # fmt: skip
# What builds images and runs checks, in a checkout.
SHELL = ("build", "lock", "mxnet_operator", "run", "serve", "setup.sh", "test")
LEFT_OUT = {"compat/README.md", "engine/native/operator.cc"} | {f"scripts/{n}" for n in SHELL}


def test_all_files_of_the_packages_are_in_the_wheel(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.so")  # of other Pythons, too
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # What is packed does not depend on it, and it takes 10 s.
    project = source / "pyproject.toml"
    project.write_text(project.read_text("utf-8").replace('"-O3"', '"-O0"'), "utf-8")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run([*build, "-w", wheels, source], check=True, timeout=120)
    (wheel,) = wheels.iterdir()
    with ZipFile(wheel) as file:
        packed = set(file.namelist())
    there = {
        str(file.relative_to(source))
        for name in PACKAGES
        for file in (source / name).rglob("*")
        if file.is_file()
    }
    assert there - packed == LEFT_OUT
    assert str(library.LIBRARY.relative_to(ROOT)) in packed
