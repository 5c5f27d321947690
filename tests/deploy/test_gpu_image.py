"""The GPU image without building it: what it installs, and its defaults."""

from __future__ import annotations

import re
import subprocess

import pytest
from packaging.requirements import Requirement

from engine.backends import precisions
from serving.process.device import BUILDS
from tests.e2e.server import REPOSITORY

CHOICES = {"mxnet": {"mxnet"}, "onnxruntime": {"onnxruntime"}, "both": {"mxnet", "onnxruntime"}}
CUDA_BUILDS = {"mxnet": "mxnet-cu117", "onnxruntime": "onnxruntime-gpu"}
DOCKERFILE = (REPOSITORY / "Dockerfile.gpu").read_text(encoding="utf-8")


def pins(name: str) -> dict[str, str]:
    """Versions by name, of what Python 3.11 installs from a list."""
    text = (REPOSITORY / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found = map(Requirement, re.findall(r"^(\w[^\\]*) \\$", text, re.MULTILINE))
    python = {"python_version": "3.11", "python_full_version": "3.11.2"}
    here = [pin for pin in found if not pin.marker or pin.marker.evaluate(python)]
    return {pin.name: str(pin.specifier) for pin in here}


def lists(choice: str) -> subprocess.CompletedProcess[str]:
    """What the Dockerfile gives to docker/python.sh, whose `uninstall` makes the CPU's build go."""
    (case,) = re.findall(r"^RUN (case .*? esac) ", DOCKERFILE, re.MULTILINE | re.DOTALL)
    command = ["sh", "-c", f"{case}; echo $lists"]
    return subprocess.run(
        command, env={"BACKENDS": choice}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("choice", CHOICES)
def test_cuda_builds_stand_in_the_place_of_those_for_cpus(choice: str) -> None:
    chosen = lists(choice).stdout.split()
    assert {name.removeprefix("gpu-") for name in chosen} == CHOICES[choice]
    cpu = pins("run")
    installed = {
        name: version for chosen_list in chosen for name, version in pins(chosen_list).items()
    }
    for backend in CHOICES[choice]:
        assert installed[CUDA_BUILDS[backend]] == cpu[backend]
        assert backend not in installed
    shared = installed.keys() & cpu.keys()
    assert {name: installed[name] for name in shared} == {name: cpu[name] for name in shared}
    cuda_13 = any(name.endswith("-cu13") for name in installed)
    cuda_11 = any(name.endswith("-cu11") for name in installed)
    assert (cuda_11, cuda_13) == tuple(backend in CHOICES[choice] for backend in CUDA_BUILDS)


def test_a_choice_that_is_none_is_told() -> None:
    done = lists("torch")
    assert done.returncode == 2
    assert done.stderr == "BACKENDS is 'torch', must be mxnet, onnxruntime or both\n"
    assert done.stdout == ""


def environment(stage: str) -> dict[str, str]:
    """Return the variables that a stage of the Dockerfile and the stages below it set."""
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
    assert set_here["ENGINE_BACKEND"] in CUDA_BUILDS
    # The backend's own for the device it is given: fp16 fits no CPU, int8 no GPU.
    assert "ENGINE_PRECISION" not in set_here
    expected = {"mxnet": "fp32", "onnxruntime": "fp16"}[set_here["ENGINE_BACKEND"]]
    assert precisions(set_here["ENGINE_BACKEND"], "gpu")[0] == expected


def test_the_script_and_the_dockerfile_have_one_default() -> None:
    (default,) = re.findall(r"^ARG BACKENDS=(.*)$", DOCKERFILE, re.MULTILINE)
    script = (REPOSITORY / "scripts" / "build").read_text(encoding="utf-8")
    assert re.search(rf"\b{default} \(default;", script)
