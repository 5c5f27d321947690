"""The files, packages and labels of the image."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.container.containers import HARDENED, TEXT, Container, docker

pytestmark = pytest.mark.container

MAX_BYTES = {"cpu": 900_000_000, "slim": 680_000_000}
# Strip could have broken one.
OPEN_ALL = """
import ctypes, pathlib, sysconfig
libraries = sorted(pathlib.Path(sysconfig.get_path("purelib")).rglob("*.so*"))
assert len(libraries) > 150, len(libraries)
import mxnet
for library in libraries:
    ctypes.CDLL(str(library), ctypes.RTLD_LOCAL)
"""


def inside(image: str, *command: str) -> str:
    return docker("run", "--rm", image, *command)


def test_it_says_what_it_can_do(image: str) -> None:
    said = json.loads(docker("inspect", image))[0]
    config = said["Config"]
    for name in ("multi-models", "accept-bind-to-port"):
        assert config["Labels"][f"com.amazonaws.sagemaker.capabilities.{name}"] == "true"
    for name in ("title", "description", "created", "revision", "version", "base.name"):
        assert config["Labels"][f"org.opencontainers.image.{name}"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert set(config["ExposedPorts"]) == {"8080/tcp", "8081/tcp"}
    assert config["User"] not in ("", "0", "root")
    assert config["Entrypoint"] == ["env", "--block-signal=TERM,INT,HUP", "dockerd-entrypoint.py"]
    assert config["Cmd"] == ["serve"]


def test_it_stays_small(image: str, slim: tuple[str, Path]) -> None:
    for name, most in zip((image, slim[0]), MAX_BYTES.values(), strict=True):
        assert json.loads(docker("inspect", name))[0]["Size"] < most


def test_another_command_is_run_as_it_is(image: str) -> None:
    out = inside(image, "bash", "-c", "id -u; ls /opt/kogpt2/model_store; exit 0")
    assert out.split() == ["10001", "dongju.tar.gz", "sowol.tar.gz"]
    failing = ["docker", "run", "--rm", image, "bash", "-c", "exit 7"]
    assert subprocess.run(failing, timeout=60, check=False).returncode == 7


def test_what_was_left_out_is_not_missed(image: str) -> None:
    assert "No broken requirements" in inside(image, "pip", "check")
    inside(image, "python", "-W", "ignore", "-c", OPEN_ALL)
    out = inside(image, "bash", "-c", "command -v gcc javac docker; java -version")
    assert out.startswith("openjdk version")


def test_no_secret_or_test_of_the_checkout_is_in_it(image: str) -> None:
    found = inside(image, "find", "/opt/kogpt2", "-type", "f", "-not", "-name", "*.pyc")
    tops = {line.split("/")[3] for line in found.split()}
    folders = {"bin", "common", "compat", "engine", "handlers", "model_store", "serving"}
    assert tops == folders | {"LICENSE", "sitecustomize.py"}


# Without MXNet


def test_the_slim_image_answers_without_mxnet(slim: tuple[str, Path]) -> None:
    with closing(Container(*HARDENED, image=slim[0])) as container:
        container.wait_until_ready()
        assert container.load("sowol").status_code == 200
        assert container.predict("sowol").json()["generated_text"].startswith(TEXT)
        with pytest.raises(AssertionError, match="No module named 'mxnet'"):
            docker("exec", container.id, "python", "-c", "import mxnet")
        assert "No broken requirements" in docker("exec", container.id, "pip", "check")


def test_what_needs_mxnet_is_told_where_it_is(slim: tuple[str, Path]) -> None:
    said = docker("run", "--rm", "-e", "ENGINE_BACKEND=mxnet", slim[0], check=False)
    assert "there is no MXNet in this image: take the one that `scripts/build cpu` makes" in said


def test_the_sbom_has_what_is_installed(slim: tuple[str, Path]) -> None:
    name, file = slim
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["name"] == "kogpt2-serving"
    purls = {component["purl"] for component in found["components"] if "purl" in component}
    printed = inside(name, "pip", "list", "--format=json").splitlines()
    (listed,) = (json.loads(line) for line in printed if line.startswith("["))
    assert {f"pkg:pypi/{p['name'].lower().replace('_', '-')}@{p['version']}" for p in listed} <= {
        purl.partition("?")[0] for purl in purls
    }
    version = quote(inside(name, "dpkg-query", "-Wf", "${Version}", "libgomp1"), safe=":")
    assert f"pkg:deb/debian/libgomp1@{version}?arch=amd64&distro=debian-13" in purls
    (java,) = (purl for purl in purls if purl.startswith("pkg:generic/openjdk@21."))
    assert java.rpartition("@")[2] in inside(name, "java", "-version")
    licensed = [c for c in found["components"] if c["purl"].startswith("pkg:pypi/")]
    assert sum("licenses" in c for c in licensed) > 0.8 * len(licensed)
