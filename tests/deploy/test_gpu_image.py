"""What can be known of the GPU image without building it: what it installs, and its defaults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from engine.backends import BACKENDS, precisions
from serving.process.device import BUILDS
from tests.e2e.server import REPOSITORY

CHOICES = {"mxnet": {"mxnet"}, "onnxruntime": {"onnxruntime"}, "both": {"mxnet", "onnxruntime"}}
CUDA_BUILDS = {"mxnet": "mxnet-cu117", "onnxruntime": "onnxruntime-gpu"}
DOCKERFILE = (REPOSITORY / "Dockerfile.gpu").read_text(encoding="utf-8")
# Writes down how it was called; its engine answers, its images are of no size.
DOCKER = """#!/bin/sh
[ "$1 $2" != "image inspect" ] || echo 0
echo "$*" >>{log}
"""


def image_requirements(choice: str) -> subprocess.CompletedProcess[str]:
    command = ["scripts/lib/image_requirements", choice, str(REPOSITORY)]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False
    )


def pins(text: str) -> dict[str, str]:
    """Versions by name, of what Python 3.11 installs."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)(?:; *(.*?))?\s*(?:#.*)?$", text, re.MULTILINE)
    return {name: version for name, version, marker in found if marker != 'python_version < "3.11"'}


CPU = pins((REPOSITORY / "requirements.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("choice", CHOICES)
def test_cuda_builds_stand_in_the_place_of_those_for_cpus(choice: str) -> None:
    done = image_requirements(choice)
    assert done.returncode == 0, done.stderr
    installed = pins(done.stdout)
    for backend in BACKENDS:
        on_gpu = backend in CHOICES[choice]
        assert (CUDA_BUILDS[backend] in installed) == on_gpu
        assert (backend in installed) != on_gpu  # never both: they have files of the same names
        name = CUDA_BUILDS[backend] if on_gpu else backend
        assert installed[name] == CPU[backend]
    others = CPU.keys() - CUDA_BUILDS.keys()
    assert {name: installed[name] for name in others} == {name: CPU[name] for name in others}
    cuda_13 = any(name.endswith("-cu13") for name in installed)
    cuda_11 = any(name.endswith("-cu11") for name in installed)
    assert (cuda_11, cuda_13) == tuple(backend in CHOICES[choice] for backend in BACKENDS)
    # The file lies beside the one that it names.
    assert "-r requirements-build.txt\n" in done.stdout


def test_a_choice_that_is_none_is_told() -> None:
    done = image_requirements("torch")
    assert done.returncode == 2
    assert done.stderr == (
        "image_requirements: BACKENDS is 'torch', must be mxnet, onnxruntime or both\n"
    )
    assert done.stdout == ""


def environment(stage: str) -> dict[str, str]:
    """What a stage of the Dockerfile sets, with what it builds on."""
    for part in re.split("^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        base, _, name = head.partition(" AS ")
        if name == stage:
            lines = re.findall(r"^ENV ((?:.*\\\n)*.*)", body, re.MULTILINE)
            here = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', " ".join(lines)))
            return {**environment(base), **here}
    return {}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_computes_by_default_is_in_the_image_and_on_the_gpu(choice: str) -> None:
    assert DOCKERFILE.endswith("\nFROM default-$BACKENDS\n")
    set_here = environment(f"default-{choice}")
    assert set_here["ENGINE_DEVICE"] == "gpu"
    assert set_here["ENGINE_BACKEND"] in CHOICES[choice] & BUILDS.keys()
    assert set_here["ENGINE_BACKEND"] in BACKENDS
    # The backend's own for the device it is given: fp16 fits no CPU, int8 no GPU.
    assert "ENGINE_PRECISION" not in set_here
    expected = {"mxnet": "fp32", "onnxruntime": "fp16"}[set_here["ENGINE_BACKEND"]]
    assert precisions(set_here["ENGINE_BACKEND"], "gpu")[0] == expected


def test_the_script_and_the_dockerfile_have_one_default() -> None:
    (default,) = re.findall(r"^ARG BACKENDS=(.*)$", DOCKERFILE, re.MULTILINE)
    helped = build("--help").stdout
    assert re.search(rf"\b{default} \(default;", helped)


def build(*arguments: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/build", *arguments],
        cwd=REPOSITORY,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu", "--backends", "torch"], "--backends is 'torch', must be onnxruntime, mxnet or"),
        (["gpu", "--backends"], "--backends is '', must be"),
        (["cpu", "--backends", "mxnet"], "--backends is for the gpu image"),
    ],
)
def test_wrong_choices_are_told_before_anything_is_built(arguments: list[str], said: str) -> None:
    done = build(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(("arguments", "choice"), [([], None), (["--backends", "mxnet"], "mxnet")])
def test_the_choice_reaches_the_dockerfile(
    tmp_path: Path, arguments: list[str], choice: str | None
) -> None:
    docker, log = tmp_path / "docker", tmp_path / "log"
    docker.write_text(DOCKER.format(log=log), encoding="utf-8")
    docker.chmod(0o755)
    done = build("gpu", *arguments, path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("build -f ")]
    assert "-f Dockerfile.gpu -t kogpt2-serving:gpu " in line
    found = re.findall("--build-arg BACKENDS=([a-z]+)", line)
    assert found == ([choice] if choice else [])
