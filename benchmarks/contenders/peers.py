"""The engines that ours is compared with: their environment, and the model in their formats."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.process import ROOT, BenchmarkError
from scripts.lib.environment import ensure_environment

ENVIRONMENT = ROOT / ".venv-benchmark"
PYTHON = ENVIRONMENT / "bin" / "python"
SERVER = ENVIRONMENT / "bin" / "llama-server"
UV = ENVIRONMENT / "bin" / "uv"
GROUP = f"{ROOT}/pyproject.toml:llama-cpp"  # compiled here, which may fail
MODULES = {"transformers": "transformers", "ctranslate2": "ctranslate2", "llama.cpp": "llama_cpp"}
EXPORT_S = 300.0
OPTIONS = ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
CMAKE = ("-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in OPTIONS))
BUILD = ("--target", SERVER.name, "--parallel", str(os.cpu_count() or 1))


def install() -> None:
    """Makes the environment. Raises `Failed`; without a compiler llama.cpp is left out."""
    ensure_environment(ENVIRONMENT, "benchmark")
    print("compiling llama.cpp, some ten minutes on two cores", file=sys.stderr)
    llama = [str(UV), "pip", "install", "--python", str(PYTHON), "--group", GROUP]
    if subprocess.run(llama).returncode or not (SERVER.exists() or _build_server()):
        print("llama.cpp could not be compiled and is left out", file=sys.stderr)


def _build_server() -> bool:
    """llama.cpp's server from the sources that the Python package brings, but does not install."""
    with tempfile.TemporaryDirectory(prefix="llama-") as folder:
        get = ["download", "--no-deps", "--no-binary", ":all:", "--dest", folder, "--group", GROUP]
        if subprocess.run([str(PYTHON), "-m", "pip", *get]).returncode:
            return False
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/vendor/llama.cpp")
        build = Path(folder) / "build"
        configure = ["cmake", "-S", str(source), "-B", str(build), *CMAKE]
        for command in (configure, ["cmake", "--build", str(build), *BUILD]):
            if subprocess.run(command).returncode:
                return False
        shutil.copy2(build / "bin" / SERVER.name, SERVER)
    return True


def llama_server() -> Path:
    """Raises `BenchmarkError` where it is not installed."""
    if not SERVER.exists():
        raise BenchmarkError("not installed: kogpt2 bench --install-peers")
    return SERVER


def missing(name: str) -> str | None:
    """Why a peer cannot be measured, or None."""
    if not PYTHON.exists():
        return "not installed: kogpt2 bench --install-peers"
    found = subprocess.run(
        [
            str(PYTHON),
            "-c",
            f"import importlib.util as u; exit(u.find_spec({MODULES[name]!r}) is None)",
        ]
    )
    return "not installed: kogpt2 bench --install-peers" if found.returncode else None


def export(name: str, artifact: Path, folder: Path, log: Path) -> Path:
    """The artifact in the peer's format, in `folder`; made unless it is there."""
    target = folder / f"{artifact.name}.{name}"
    if name == "transformers":
        return _make("transformers", artifact, target, log)
    if name == "ctranslate2":
        saved = export("transformers", artifact, folder, log)
        return _make("ctranslate2", saved, target, log)
    return _make("llama_cpp", artifact, folder / f"{artifact.name}.gguf", log)


def _make(module: str, source: Path, target: Path, log: Path) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    building = target.with_name(f".{target.name}")
    if building.is_dir():
        shutil.rmtree(building)
    with log.open("ab") as file:
        done = subprocess.run(
            [str(PYTHON), "-m", f"benchmarks.contenders.{module}", "--export", source, building],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=file,
            timeout=EXPORT_S,
        )
    if done.returncode:
        raise BenchmarkError(f"the model could not be converted by {module}, see {log}")
    building.rename(target)
    return target


def draw(results: Path, plot: Path, module: str = "plot") -> None:
    """Draws the plot with the peers' matplotlib."""
    if not PYTHON.exists():
        raise BenchmarkError("no plot: matplotlib comes with kogpt2 bench --install-peers")
    command = [str(PYTHON), "-m", f"benchmarks.report.{module}", str(results), str(plot)]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise BenchmarkError("the plot could not be drawn")
