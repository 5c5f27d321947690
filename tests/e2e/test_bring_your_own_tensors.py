"""docs/models/tensors.md is true: its artifacts are made and its examples are run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from common.mxnet_compat import mx
from tests.e2e.console import blocks, printed, ran, session
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import SHORT, error, packed, small, text
from tests.handlers.tensors.graphs import TinyLM

pytestmark = pytest.mark.slow

LM = TinyLM(vocab=50_000)
PAGES_IN = REPOSITORY / "docs" / "models"
PAGES = ("tensors.md", "tensors.ko.md")


def sums(folder: Path) -> Path:
    """(a, b) -> (a + b, a - b)"""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    args = {"fc_weight": mx.nd.array([[1, 1], [1, -1]]), "fc_bias": mx.nd.zeros(2)}
    folder.mkdir(parents=True)
    mx.model.save_checkpoint(str(folder / "model"), 0, net, args, {})
    (folder / "model-shapes.json").write_text('[{"shape": [1, 2], "name": "data"}]')
    return folder


@pytest.fixture(scope="module")
def server(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder, store = tmp_path_factory.mktemp("tensors"), clean.store
    LM.save(folder / "gpt2" / "1" / "model.onnx")
    packed(folder / "gpt2", store / "gpt2.tar.gz")
    packed(sums(folder / "sums"), store / "sums.tar.gz")
    small(store / "text")
    return clean


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_commands_answer_as_it_shows(server: Server, name: str) -> None:
    commands = session(PAGES_IN / name)
    assert len(commands) == 5
    for command, shown in commands:
        shown, cut, _ = shown.partition("...")
        answer = printed(server, command)
        assert (answer[: len(shown)] if cut else answer) == shown, command


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_programs_run(server: Server, name: str) -> None:
    programs = [block for block in blocks(PAGES_IN / name, "python") if "localhost" in block]
    answers = [json.loads(ran(server, program)) for program in programs]
    likeliest = LM.logits(np.array([[5, 6, 7]]))[0, -1].argmax()
    assert answers == [likeliest, [[3.0, -1.0], [7.5, -1.5]]]


def test_a_text_model_beside_them_is_as_before(server: Server) -> None:
    assert text(server.predict("text", SHORT))
    (worker,) = server.descendants("model_service_worker")
    assert worker.memory_full_info().uss < 1 << 20
    (host,) = server.descendants("handlers.host")
    assert "_multiarray_umath" not in " ".join(m.path for m in host.memory_maps())
    assert host.memory_full_info().uss < 40 << 20


SCRIPTS = {
    "own-input": """
def input_fn(body, content_type):
    import numpy
    return numpy.array([[float(n) for n in body.split()]])
""",
    "own-predict": """
import mxnet as mx

def predict_fn(data, model):
    assert isinstance(model, mx.mod.Module) and isinstance(data, mx.io.NDArrayIter)
    return model.predict(data) * 2
""",
    "own-output": """
def output_fn(prediction, accept):
    return "합 " + str(prediction.asnumpy()[0, 0]), "text/plain; charset=utf-8"
""",
    "own-transform": """
import mxnet as mx

def transform_fn(model, body, content_type, accept):
    model.forward(mx.io.DataBatch([mx.nd.array([[1, 2]])]), is_train=False)
    return str(model.get_outputs()[0].asnumpy().tolist()), "text/plain"
""",
}


@pytest.mark.parametrize(
    ("name", "body", "kind", "wanted"),
    [
        ("own-input", b"1 2", "text/plain", "[[3.0,-1.0]]"),
        ("own-predict", b"1,2", "text/csv", "[[6.0,-2.0]]"),
        ("own-predict", b"[[1,2],[3,4.5]]", "application/json", "[[6.0,-2.0],[15.0,-3.0]]"),
        ("own-output", b"[[1,2]]", "application/json", "합 3.0"),
        ("own-transform", b"", "text/plain", "[[3.0, -1.0]]"),
    ],
)
def test_a_script_around_a_checkpoint_may_leave_functions_out(
    server: Server, name: str, body: bytes, kind: str, wanted: str
) -> None:
    folder = server.store / name
    if not folder.exists():
        sums(folder)
        (folder / "code").mkdir()
        (folder / "code" / "inference.py").write_text(SCRIPTS[name], encoding="utf-8")
    answer = server.predict(name, body, **{"Content-Type": kind})
    assert (answer.status_code, answer.text) == (200, wanted)
    if name == "own-predict":
        assert error(server.predict(name, [[1, 2, 3]]))[0] == 400
        told = server.get(f"/v2/models/{name}").json()
        assert told == {
            "name": name, "versions": ["1"], "platform": "", "inputs": [], "outputs": [],
        }  # fmt: skip


def test_a_model_that_does_not_fit_is_507_with_the_numbers(server: Server) -> None:
    folder = server.store / "huge"
    LM.save(folder / "model.onnx")
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(1 << 42)  # takes no room on disk
    answer = server.load("huge")
    assert error(answer) == (507, "NeverFits")
    assert re.search(r"needs about \d+ MiB, but of the container's \d+ MiB", answer.text)
