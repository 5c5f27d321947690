"""The engine on aarch64, in QEMU: its text of a demo model is the one of x86-64.

QEMU takes many minutes to build the whole image (docs/deploy/containers.md). So Python is Debian's
for arm64 and the packages are the lists' wheels for aarch64, only unpacked, and the library comes
from a cross compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import random_model
from tests.engine.engines import EngineProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PYTHON, SUFFIX = "python3.11", ".cpython-311-aarch64-linux-gnu.so"
# Python, and what it and the wheels are linked with.
DEBIAN = [f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "libc6", "libcrypt1"]
DEBIAN += ["libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0"]
DEBIAN += ["liblzma5", "libuuid1"]
PROGRAMS = ("qemu-aarch64", "aarch64-linux-gnu-gcc", "apt-get", "dpkg-deb")
UNUSED = "boto3\nbotocore\nonnx\nonnxruntime\npillow\npip\nscipy\n"  # by text of the native core
EMULATED_S = 240.0
PROMPT, TEXT = "나 보기가 역겨워", " 가실 때에는 말없이 고이 보내 드리우리다. 영"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command and returns its output; a failure shows its stderr."""
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def unpack_debian(folder: Path, root: Path) -> None:
    """Debian's packages for arm64, from the places of this machine's own."""
    for made in ("state/lists/partial", "cache/archives/partial", "debs"):
        (folder / made).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    try:
        run(*apt, "update")
        run(*apt, "download", *DEBIAN, cwd=folder / "debs")
    except AssertionError as error:
        pytest.skip(f"Debian's packages for arm64 cannot be had: {error}")
    for package in (folder / "debs").iterdir():
        run("dpkg-deb", "-x", package, root)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs Python for aarch64 with the packages of requirements/run.txt."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not here; .ci/run installs it on Debian")
    folder = tmp_path_factory.mktemp("arm64")
    root, excluded = folder / "root", folder / "excluded"
    unpack_debian(folder / "apt", root)
    excluded.write_text(UNUSED)
    run(
        *(Path(sys.prefix) / "bin" / "uv", "pip", "install", "--quiet", "--python", sys.executable),
        *("--python-platform", "aarch64-manylinux_2_36", "--python-version", "3.11"),
        *("--target", root / "usr/local/lib" / PYTHON / "dist-packages", "--excludes", excluded),
        *("--no-deps", "--no-build-isolation", "--require-hashes", "-r", "requirements/run.txt"),
    )
    # sys.executable is this script: only QEMU can run a program for aarch64, also as a child.
    python = root / "usr/bin/python"
    python.write_text(f'#!/bin/sh\nexec qemu-aarch64 -L {root} -0 "$0" {python}3.11 "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the engine with its library for aarch64."""
    folder = tmp_path_factory.mktemp("code")
    for name in ("common", "engine"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    run(
        *(sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_ext"),
        *("--build-lib", folder, "--build-temp", folder / "build"),
        CC="aarch64-linux-gnu-gcc",
        LDSHARED="aarch64-linux-gnu-gcc -shared",
        SETUPTOOLS_EXT_SUFFIX=SUFFIX,
    )
    assert (folder / "engine/native" / f"_pass{SUFFIX}").exists()
    return folder


@pytest.fixture
def engine(python: Path, code: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    environment = {"ENGINE_BACKEND": "native", "PYTHONDONTWRITEBYTECODE": "1"}
    process = EngineProcess(tmp_path, python=python, root=code, wait_s=EMULATED_S, **environment)
    yield process
    process.close()


def test_the_text_is_that_of_x86_64(engine: EngineProcess, tmp_path: Path) -> None:
    body = {"name": "소월", "model_dir": str(random_model.demo("sowol", tmp_path / "시집"))}
    for _ in range(3):  # its limit for reading a tokenizer is not meant for an emulated processor
        status, model = engine.call("POST", "/models", body)
        if status != 503:
            break
    assert status == 200, model
    assert model["precision"] == "int8"
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    status, answer = engine.call("POST", "/models/%EC%86%8C%EC%9B%94/generate", body)
    assert (status, answer["completions"][0]["text"]) == (200, TEXT), answer
