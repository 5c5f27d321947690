"""A container of one gigabyte is never killed for its memory: what does not fit gets 507."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed import random_model
from tests.container.conftest import Start
from tests.container.containers import CACHE, HARDENED, Container, mount
from tests.e2e.stores import SHORT, small

pytestmark = pytest.mark.container

GIGABYTE = ["--memory", "1g", "--memory-swap", "1g"]
MOST = 250


def copies(model: Path, store: Path, count: int) -> Path:
    """The same files under many names."""
    for number in range(count):
        (store / f"m{number}").mkdir(parents=True)
        for file in model.iterdir():
            os.link(file, store / f"m{number}" / file.name)
    return store


def use_all(container: Container, names: list[str]) -> None:
    for name in names:
        assert container.predict(name, SHORT).status_code == 200


def fill(container: Container) -> list[str]:
    """Loads until one more does not fit; returns the names of those that do."""
    for number in range(MOST):
        answer = container.load(f"m{number}")
        if answer.status_code == 507:
            return [f"m{n}" for n in range(number)]
        assert answer.status_code == 200, answer.text
    raise AssertionError(f"{MOST} models fit")


@pytest.fixture(params=["many small models", "a few of the full size"])
def full(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Container:
    """A server whose memory is not full yet."""
    if request.param == "many small models":
        store = copies(small(tmp_path / "model"), tmp_path / "store", MOST)
        environment = {"ENGINE_BACKEND": "mxnet", "ENGINE_MEMORY_MIB": "8"}
    else:
        model = random_model.make(tmp_path, random_model.FULL, 1, "float16")
        store = copies(model, tmp_path / "store", 40)
        environment = {"ENGINE_BACKEND": "native"}
    options = [*GIGABYTE, *HARDENED, *CACHE, *mount(store, "/models")]
    return start(*options, MODEL_STORE="/models", SAGEMAKER_MULTI_MODEL="true", **environment)


def test_models_load_until_507_and_unloading_makes_room(full: Container) -> None:
    fitting = fill(full)
    print(f"{len(fitting)} models fit")
    assert len(fitting) >= 2
    use_all(full, fitting)
    more = f"m{len(fitting)}"
    left = list(fitting)
    while (answer := full.load(more)).status_code == 507:
        assert full.unload(left.pop()).status_code == 200
    assert answer.status_code == 200
    assert len(fitting) // 2 <= len(left) < len(fitting)
    use_all(full, [*left, more])
    assert not full.state()["OOMKilled"]
    assert "SIGKILL" not in full.log()
