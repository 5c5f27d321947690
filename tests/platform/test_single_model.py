"""The server as the container of one model."""

from __future__ import annotations

import json
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.stores import FAST, SHORT, small, text
from tests.platform.conftest import A_USER, IS_ROOT
from tests.processes import readable_by_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Where the tests are root it starts as the platform's do: only root may read its model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)  # pytest's folders are closed to other users
        model = small(folder / "ml" / "model")
        environment = {
            **FAST,
            "SAGEMAKER_BASE_DIR": str(folder / "ml"),
            "SAGEMAKER_MODEL_NAME": unicodedata.normalize("NFD", "봄노래"),
            "MODEL_STORE": str(small(folder / "store" / "시", 2).parent),
            **({"RUN_AS_USER": str(A_USER)} if IS_ROOT else {}),
        }
        if IS_ROOT:
            for path in (model.parent, model, *model.iterdir()):
                path.chmod(0o700 if path.is_dir() else 0o600)
        prefix = readable_by_all(sys.executable) if IS_ROOT else ()
        with Server(
            folder, None, environment, options=False, one_port=True, prefix=prefix
        ) as server:
            yield server


def test_the_model_is_loaded_at_the_start_on_the_port_that_sagemaker_names(
    server: Server,
) -> None:
    assert f"port {server.port} serves both requests and management" in server.text()
    before = own(server)
    assert server.loaded() == ["봄노래"]
    assert text(server.predict("봄노래", SHORT)) == before
    assert text(server.predict("시", SHORT)) != before  # the store is MODEL_STORE's
    assert server.unload("시").status_code == 200
    server.kill_gateway()
    assert own(server) == before


def own(server: Server) -> str:
    """The text of its one model."""
    return text(server.post("/invocations", json=SHORT))


# Batch Transform: `SplitType=Line`. Whether it reads before it has sent its body is not documented.


@pytest.mark.parametrize("strategy", ["MultiRecord", "SingleRecord"])
def test_batch_transform_gets_a_line_for_each_record_also_after_a_whole_body(
    server: Server, strategy: str
) -> None:
    lines = "application/jsonlines"
    headers = {"Content-Type": lines, "Accept": lines}
    single = own(server)
    record = json.dumps(SHORT, ensure_ascii=False).encode()
    filler = b" " * 20_000  # 6 MB: the default of MaxPayloadInMB
    bodies = [record] * 3
    if strategy == "MultiRecord":
        bodies = [b"\n".join([record + filler] * 310)]
    for body in bodies:
        answer = server.post("/invocations", data=body, headers=headers)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, lines)
        texts = [json.loads(line)["generated_text"] for line in answer.content.splitlines()]
        assert texts == [single] * (body.count(b"\n") + 1)
