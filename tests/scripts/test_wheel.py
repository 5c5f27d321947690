<<<<<<< HEAD
"""`pip install .` brings all that the packages need, not their Python alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compat", "engine", "handlers", "serving", "scripts")
# What builds images and runs checks, in a checkout.
SHELL = ("build", "lock", "run", "serve", "setup.sh", "test")
LEFT_OUT = {"compat/README.md", "scripts/lib/image_java", "scripts/lib/image_python"} | {
    f"scripts/{name}" for name in SHELL
}


def test_all_files_of_the_packages_are_in_the_wheel(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
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
=======
"""`pip install .`: the package has all that the server and the command read."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.e2e.server import REPOSITORY

PACKAGES = ("common", "compat", "engine", "handlers", "scripts", "serving")
# Of a checkout: pages, and what the shell and Docker run.
LEFT_OUT = {".md", ".sh", ""}


def test_the_wheel_has_every_file_of_the_packages_and_the_command(tmp_path: Path) -> None:
    tracked = ["git", "ls-files", *PACKAGES, "pyproject.toml", "README.md", "LICENSE"]
    listed = subprocess.check_output(tracked, cwd=REPOSITORY, text=True).splitlines()
    for name in listed:
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(REPOSITORY / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "-w", tmp_path, tmp_path / "checkout"], check=True, timeout=120)
    (file,) = tmp_path.glob("kogpt2_serving-*.whl")
    with zipfile.ZipFile(file) as wheel:
        packed = set(wheel.namelist())
        (entry,) = (name for name in packed if name.endswith("entry_points.txt"))
        assert "kogpt2 = scripts.cli:main" in wheel.read(entry).decode()
    wanted = {name for name in listed if name.startswith(PACKAGES)}
    missing = {name for name in wanted - packed if Path(name).suffix not in LEFT_OUT}
    assert not missing
>>>>>>> 17f8c04 (The wheel has the gRPC protocol; the image has nothing of the command's; why uv could not fetch a Python is said)
