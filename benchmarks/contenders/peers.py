"""The peers, engines that ours is compared with: their environments and model formats."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import Worker
from command.environments import ensure_environment
from engine.artifacts.files import read_json
from testbed import random_model
from testbed.classifiers import ARCHITECTURE
from testbed.process import ROOT, ProgramError

ENVIRONMENT = ROOT / ".venv-benchmark"
OPENVINO = ROOT / ".venv-openvino"  # needs an older transformers
PYTHON = ENVIRONMENT / "bin" / "python"
SERVER = ENVIRONMENT / "bin" / "llama-server"
UV = ENVIRONMENT / "bin" / "uv"
GROUP = f"{ROOT}/pyproject.toml:llama-cpp"  # compiled on this machine, which may fail
MODULES = {
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
    "llama.cpp": "llama_cpp",
    "openvino": "openvino_genai",
    "peft": "peft",
    "onnxruntime": "onnx",
}
NAMES = {*MODULES, "llama-server", "openvino-genai", "llama.cpp Q8_0"}
RUN_S = 300.0
MISSING = "not installed: kogpt2 bench --install-peers"
OPTIONS = ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")
CMAKE = ("-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in OPTIONS))
BUILD = ("--target", SERVER.name, "--parallel", str(os.cpu_count() or 1))


def install() -> None:
    """Install the peers' environments, without a compiler all but llama.cpp. Raises `Failed`."""
    ensure_environment(ENVIRONMENT, "benchmark")
    ensure_environment(OPENVINO, "openvino")
    print("compiling llama.cpp, some ten minutes on two cores", file=sys.stderr)
    llama = [str(UV), "pip", "install", "--python", str(PYTHON), "--group", GROUP]
    if subprocess.run(llama).returncode or not (SERVER.exists() or _build_server()):
        print("llama.cpp could not be compiled and is left out", file=sys.stderr)


def _build_server() -> bool:
    """Build llama.cpp's server from sources in the Python package; return whether it worked."""
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


def python(name: str) -> Path:
    """Return the path of a peer's Python. Raises `ProgramError` if the peer is not installed."""
    environment = OPENVINO if name == "openvino" else ENVIRONMENT
    if not [*environment.glob(f"lib/python3*/site-packages/{MODULES[name]}")]:
        raise ProgramError(MISSING)
    if name == "onnxruntime":  # the server has it; its models are exported where torch is
        return Path(sys.executable)
    return environment / "bin" / "python"


def start(
    name: str,
    module: str,
    artifact: Path,
    arguments: Sequence[Path | str],
    exports: Path,
    log: Path,
) -> Worker:
    """Start a contender in a peer's environment.

    Its arguments are the model in the peer's format, the number of threads, and `arguments`.
    """
    threads, interpreter = str(len(os.sched_getaffinity(0))), python(name)
    model = export("transformers" if name == "peft" else name, artifact, exports, log)
    environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    given: list[Path | str] = [model, threads, *arguments]
    return Worker(interpreter, f"contenders.{module}", given, log, environment)


def export(name: str, artifact: Path, folder: Path, log: Path) -> Path:
    """Convert an artifact into a peer's format in `folder`, unless it exists; return its path.

    A classifier of `testbed.classifiers` is in the format of transformers.
    """
    classifies = read_json(artifact / "config.json").get("architectures") == [ARCHITECTURE]
    if classifies and name == "transformers":
        return artifact
    target = folder / f"{artifact.name}.{'gguf' if name == 'llama.cpp' else name}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}")
    shutil.rmtree(building, ignore_errors=True)
    if name == "transformers":
        _run(
            log, sys.executable, "-m", "scripts.start", "convert", artifact, building, "--to", "hf"
        )
        file = building / "tokenizer_config.json"  # CTranslate2 needs an unk_token
        config = {**json.loads(file.read_text("utf-8")), "unk_token": random_model.SPECIAL[0]}
        file.write_text(json.dumps(config), encoding="utf-8")
    elif name == "ctranslate2":
        saved = export("transformers", artifact, folder, log)
        converter = ENVIRONMENT / "bin" / "ct2-transformers-converter"
        _run(log, converter, "--model", saved, "--output_dir", building, "--quantization", "int8")
    elif name == "openvino":
        saved = export("transformers", artifact, folder, log)
        exporter = OPENVINO / "bin" / "optimum-cli"
        task = "text-classification" if classifies else "text-generation-with-past"
        how = ("--task", task, "--weight-format", "int8")
        _run(log, exporter, "export", "openvino", "--model", saved, *how, building)
    elif name == "onnxruntime":
        _run(log, PYTHON, "-m", "benchmarks.contenders.classifiers", artifact, building)
    else:
        _run(log, PYTHON, "-m", "benchmarks.contenders.llama_cpp", artifact, building)
    building.rename(target)
    return target


def draw(results: Path, plot: Path, log: Path) -> None:
    """Draw the plot with the peers' matplotlib."""
    if not PYTHON.exists():
        raise ProgramError(MISSING)
    _run(log, PYTHON, "-m", "benchmarks.report.plot", results, plot)


def _run(log: Path, *command: str | Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=RUN_S
        )
    if done.returncode:
        raise ProgramError(f"{Path(command[0]).name} failed, see {log}")
