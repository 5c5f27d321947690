"""How scripts/build asks Docker, with a stand-in that writes down what it was asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from datetime import datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

import engine.settings
import serving.settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """#!/bin/sh
case "$*" in
  "buildx version") [ -n "$BUILDX" ] ;;
  "build --help") echo "--platform string"; [ -z "$BUILDX" ] || echo "--provenance string" ;;
  build*) printf '%s\\n' "$@" >>"$CALLS" ;;
  image*) echo 123000000 ;;
esac
"""


class Build:
    """`scripts/build`, and what it asked Docker for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        docker = folder / "docker"
        docker.write_text(DOCKER)
        docker.chmod(0o755)

    def __call__(
        self, *arguments: str, buildkit: bool = False, root: Path = ROOT, **more: str
    ) -> list[str]:
        calls = self._folder / "calls"
        calls.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "BUILDX": "yes" if buildkit else "",
            "CALLS": str(calls),
            **more,
        }
        command = [root / "scripts" / "build", *arguments]
        subprocess.run(command, env=environment, check=True, timeout=60, cwd=self._folder)
        return calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def values(words: list[str], option: str) -> list[str]:
    return [after for word, after in pairwise(words) if word == option]


@pytest.mark.parametrize("buildkit", [True, False])
def test_the_manifest_is_one_that_sagemaker_takes(build: Build, buildkit: bool) -> None:
    words = build("cpu", buildkit=buildkit)
    assert values(words, "--platform") == ["linux/amd64"]
    assert ("--provenance=false" in words) == buildkit


def test_the_slim_image_is_built_for_arm64(build: Build) -> None:
    words = build("slim", "--platform", "linux/arm64", "--sbom", "뜻.json")
    assert values(words, "--platform") == 2 * ["linux/arm64"]  # the second is the SBOM's
    assert values(words, "-t")[0] == "kogpt2-serving:slim-arm64"
    assert values(build("slim"), "-t") == ["kogpt2-serving:slim"]


def test_an_image_has_the_extras_that_are_asked_for(build: Build) -> None:
    assert values(build("cpu"), "--build-arg") == []
    assert values(build("cpu", "--tracing"), "--build-arg") == ["EXTRA=tracing"]
    assert values(build("cpu", "--grpc", "--tracing"), "--build-arg") == ["EXTRA=grpc tracing"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("cpu --platform linux/arm64", "linked with libarmpl_lp64_mp.so, which no package has"),
        ("gpu --platform linux/arm64", "mxnet-cu117 has no wheel for aarch64"),
        ("slim --platform arm64", "must be linux/amd64 or linux/arm64"),
    ],
)
def test_platforms_that_an_image_does_not_have(arguments: str, reason: str) -> None:
    command = [ROOT / "scripts" / "build", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert reason in done.stderr


def test_mms_has_the_library_for_unix_sockets_that_the_image_takes() -> None:
    """docker/java.sh names it by the processor."""
    jar = metadata.distribution("multi-model-server").locate_file("mms/frontend/model-server.jar")
    script = (ROOT / "docker/java.sh").read_text(encoding="utf-8")
    (name,) = re.findall(r'"(META-INF/native/.*_\$machine\.so)"', script)
    (line,) = re.findall("^machine=.*$", script, re.MULTILINE)
    for machine in ("x86_64", "aarch64"):
        shell = f'uname() {{ echo {machine}; }}; {line}\nprintf %s "{name}"'
        library = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
        assert library.stdout in zipfile.ZipFile(str(jar)).namelist()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_dockerfile_is_built_as_it_is(build: Build, kind: str) -> None:
    for buildkit in (False, True):
        words = build(kind, buildkit=buildkit)
        assert values(words, "-f") == [f"Dockerfile.{kind}"]
        assert words[-1] == "."


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_kubernetes_can_tell_that_the_user_is_not_root(kind: str) -> None:
    """`runAsNonRoot` refuses an image whose user is a name."""
    made = (ROOT / "docker/debian.sh").read_text(encoding="utf-8")
    uid = re.search(r"useradd .*--uid (\d+)", made)
    users = re.findall("^USER (.*)$", (ROOT / f"Dockerfile.{kind}").read_text("utf-8"), re.M)
    assert uid
    assert users == [uid[1]]


def test_macos_has_what_it_needs(build: Build, tmp_path: Path) -> None:
    """Its bash is 3.2, without `mapfile`, and its `realpath` knows no -m."""
    old = tmp_path / "old"
    old.write_text("enable -n mapfile readarray\nrealpath() { return 1; }\n")
    words = build("cpu", "--sbom", "뜻.json", BASH_ENV=str(old))
    assert values(words, "--label")
    assert (tmp_path / "뜻.json").exists()


def test_an_image_says_what_it_was_made_of(build: Build, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "Dockerfile.cpu", "scripts/build"):
        shutil.copy(ROOT / name, clone / name)
    git = ["git", "-C", str(clone), "-c", "user.name=나", "-c", "user.email=a@b"]
    for command in (
        ["init", "-q"],
        ["remote", "add", "origin", "https://me:token@git.example/시/kogpt2"],
        ["commit", "-q", "--allow-empty", "-m", "처음"],
    ):
        subprocess.run([*git, *command], check=True, timeout=60)
    base = "python:3.11-slim-bookworm@sha256:" + 64 * "0"
    words = build("slim", "--base", base, root=clone)
    labels = dict(label.split("=", 1) for label in values(words, "--label"))
    found = {name.removeprefix("org.opencontainers.image."): v for name, v in labels.items()}
    assert found["base.name"] == base
    assert found["source"] == "https://git.example/시/kogpt2"
    assert found["version"] == metadata.version("kogpt2-serving")
    assert re.fullmatch("[0-9a-f]{40}", found["revision"])
    assert datetime.fromisoformat(found["created"].replace("Z", "+00:00")).tzinfo
    assert values(words, "--build-arg") == [f"BASE={base}"]
    assert values(words, "--target") == ["slim"]

    subprocess.run([*git, "remote", "set-url", "origin", "/srv/시"], check=True, timeout=60)
    words = build("cpu", root=clone)
    assert not [label for label in values(words, "--label") if "image.source" in label]
    assert "org.opencontainers.image.base.name=python:3.11-slim-bookworm" in words


def test_the_two_files_differ_in_what_a_gpu_needs_alone() -> None:
    cpu, gpu = (
        [*re.findall(r"^(?![#\s])(?:.*\\\n)*.*", file.read_text(encoding="utf-8"), re.MULTILINE)]
        for file in (ROOT / "Dockerfile.cpu", ROOT / "Dockerfile.gpu")
    )
    own = [line for line in gpu if line not in cpu]
    assert [line.split()[0] for line in own if not line.startswith(("FROM", "ENV ENGINE"))] == [
        *("ARG", "ARG", "RUN"),  # which CUDA builds
        *("LABEL", "RUN", "ENV", "HEALTHCHECK"),
    ]
    (label,) = [line for line in own if line.startswith("LABEL")]
    assert label.replace("an NVIDIA GPU", "a CPU") in cpu


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("Dockerfile.cpu", {"RUN_DIR", "ENGINE_BACKEND"}),
        ("Dockerfile.gpu", {"RUN_DIR", "ENGINE_DEVICE", "ENGINE_BACKEND", "START_TIMEOUT_S"}),
    ],
)
def test_an_image_sets_only_what_is_its_own(file: str, own: set[str]) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = " ".join(line for line in text.splitlines() if line.startswith("ENV "))
    variables = {
        field.metadata["variable"]
        for settings in (serving.settings.Settings, engine.settings.Settings)
        for field in settings.__dataclass_fields__.values()
    }
    assert set(re.findall(r"([A-Z0-9_]+)=", lines)) & variables == own
