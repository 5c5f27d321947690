"""What scripts/build and scripts/run ask Docker for (a stand-in writes it down), and what the
Dockerfiles declare."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import engine.settings
import serving.settings
from serving.process import supervisor

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """#!/bin/sh
case "$*" in
  "build --help") echo "--platform string"; [ -z "$BUILDX" ] || echo "--provenance string" ;;
  build*) printf '%s\\n' "$@" >>"$CALLS" ;;
  "run --rm --name"*) printf '%s\\n' "$@" >"$CALLS" ;;
  image*) echo 123000000 ;;
esac
"""
STOP_S = serving.settings.Settings().drain_s + sum(
    (supervisor.LAST_GRACE_S, supervisor.GRACE_S, supervisor.KILLED_S)
)
Ask = Callable[..., list[str]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs `scripts/SCRIPT`; returns the words that Docker was called with."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)

    def run(
        script: str, *arguments: str, buildkit: bool = False, root: Path = ROOT, **more: str
    ) -> list[str]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        environment |= {"BUILDX": "yes" if buildkit else "", "CALLS": str(calls)}
        command = [root / "scripts" / script, *arguments]
        subprocess.run(command, env=environment, check=True, timeout=60, cwd=tmp_path)
        return calls.read_text(encoding="utf-8").splitlines()

    return run


def values(words: list[str], option: str) -> list[str]:
    return [after for word, after in pairwise(words) if word == option]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("buildkit", [True, False])
def test_an_image_is_built_with_a_manifest_that_sagemaker_takes(
    ask: Ask, kind: str, buildkit: bool
) -> None:
    words = ask("build", kind, buildkit=buildkit)
    assert values(words, "--platform") == ["linux/amd64"]
    assert ("--provenance=false" in words) == buildkit
    assert values(words, "-f") == [f"Dockerfile.{kind}"]
    assert words[-1] == "."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("cpu", []),
        ("cpu --tracing", ["EXTRA=tracing"]),
        ("cpu --grpc --tracing", ["EXTRA=grpc tracing"]),
        ("gpu", []),
        ("gpu --backends mxnet", ["BACKENDS=mxnet"]),
    ],
)
def test_what_is_asked_for_reaches_the_dockerfile(
    ask: Ask, arguments: str, expected: list[str]
) -> None:
    assert values(ask("build", *arguments.split()), "--build-arg") == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("cpu --platform linux/arm64", "linked with libarmpl_lp64_mp.so, which no package has"),
        ("gpu --platform linux/arm64", "mxnet-cu117 has no wheel for aarch64"),
        ("slim --platform arm64", "must be linux/amd64 or linux/arm64"),
        ("gpu --backends torch", "--backends is 'torch', must be onnxruntime, mxnet or both"),
        ("gpu --backends", "--backends is '', must be"),
        ("cpu --backends mxnet", "--backends is for the gpu image"),
    ],
)
def test_an_image_that_cannot_be_built_is_refused(arguments: str, reason: str) -> None:
    command = [ROOT / "scripts" / "build", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


def test_bash_3_2_of_macos_without_mapfile_and_realpath_m_builds(ask: Ask, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("enable -n mapfile readarray\nrealpath() { return 1; }\n")
    slim = ("slim", "--platform", "linux/arm64", "--sbom", "뜻.json")
    words = ask("build", *slim, BASH_ENV=str(old))
    assert values(words, "--platform") == 2 * ["linux/arm64"]  # the second is the SBOM's
    assert values(words, "-t")[0] == "kogpt2-serving:slim-arm64"
    assert values(words, "--label")
    assert (tmp_path / "뜻.json").exists()


def test_the_labels_of_an_image_name_its_base_source_and_revision(ask: Ask, tmp_path: Path) -> None:
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
    base = "python:3.11-slim-trixie@sha256:" + 64 * "0"
    words = ask("build", "slim", "--base", base, root=clone)
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
    words = ask("build", "cpu", root=clone)
    assert not [label for label in values(words, "--label") if "image.source" in label]
    assert "org.opencontainers.image.base.name=python:3.11-slim-trixie" in words


@pytest.mark.parametrize("kind", ["cpu", "slim", "gpu"])
def test_each_image_that_is_built_can_be_run(ask: Ask, kind: str) -> None:
    words = ask("run", kind)
    assert words[-1] == f"kogpt2-serving:{kind}"
    assert ("--gpus" in words) == (kind == "gpu")


def test_a_stop_leaves_the_time_to_finish_answers_in_flight(ask: Ask) -> None:
    (given,) = values(ask("run"), "--stop-timeout")
    assert int(given) >= STOP_S
    for name in ("compose.yaml", "compose.fleet.yaml"):
        services = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"].values()
        graces = [s["stop_grace_period"] for s in services if "stop_grace_period" in s]
        assert graces
        assert all(int(grace.removesuffix("s")) >= STOP_S for grace in graces)


# What is in an image


def test_mms_has_the_library_for_unix_sockets_that_java_sh_names_by_the_processor() -> None:
    jar = metadata.distribution("multi-model-server").locate_file("mms/frontend/model-server.jar")
    script = (ROOT / "docker/java.sh").read_text(encoding="utf-8")
    (name,) = re.findall(r'"(META-INF/native/.*_\$machine\.so)"', script)
    (line,) = re.findall("^machine=.*$", script, re.MULTILINE)
    for machine in ("x86_64", "aarch64"):
        shell = f'uname() {{ echo {machine}; }}; {line}\nprintf %s "{name}"'
        library = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
        assert library.stdout in zipfile.ZipFile(str(jar)).namelist()


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("cpu", {"RUN_DIR", "RUN_AS_USER", "ENGINE_BACKEND"}),
        ("gpu", {"RUN_DIR", "RUN_AS_USER", "ENGINE_DEVICE", "ENGINE_BACKEND", "START_TIMEOUT_S"}),
    ],
)
def test_an_image_has_a_numeric_user_and_sets_no_settings_but_its_own(
    kind: str, own: set[str]
) -> None:
    """Kubernetes' `runAsNonRoot` refuses an image whose user is a name."""
    file = (ROOT / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    uid = re.search(
        r"useradd .*--uid (\d+)", (ROOT / "docker/debian.sh").read_text(encoding="utf-8")
    )
    assert uid
    assert re.findall("^USER (.*)$", file, re.M) == [uid[1]]
    assert re.findall(r"RUN_AS_USER=(\d+)", file) == [uid[1]]
    lines = [line for line in file.replace("\\\n", " ").splitlines() if line.startswith("ENV ")]
    variables = {
        field.metadata["variable"]
        for settings in (serving.settings.Settings, engine.settings.Settings)
        for field in settings.__dataclass_fields__.values()
    }
    assert set(re.findall(r"([A-Z0-9_]+)=", " ".join(lines))) & variables == own


def test_the_two_dockerfiles_differ_only_in_what_a_gpu_needs() -> None:
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


def test_mxnet_can_be_imported_alone_by_the_sitecustomize_of_an_image(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docker/sitecustomize.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    script = "import mxnet, sys; print(mxnet.nd.ones(2).sum().asscalar(), 'common' in sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", script]
    output = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True, timeout=120)
    assert output.split() == ["2.0", "True"]
