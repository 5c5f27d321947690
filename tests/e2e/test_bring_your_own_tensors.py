"""docs/models/tensors.md is true: its artifacts are made and its examples are run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.console import blocks, printed, ran, session
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import error, packed, small
from tests.handlers.tensors.graphs import TinyLM
from tests.lazy import mx

pytestmark = pytest.mark.slow

LM = TinyLM(vocab=50_000)
PAGE = REPOSITORY / "docs" / "models" / "tensors.md"


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


def test_the_pages_commands_answer_as_it_shows(server: Server) -> None:
    commands = session(PAGE)
    assert len(commands) == 5
    for command, shown in commands:
        shown, cut, _ = shown.partition("...")
        answer = printed(server, command)
        assert (answer[: len(shown)] if cut else answer) == shown, command


def test_the_pages_programs_run(server: Server) -> None:
    programs = [block for block in blocks(PAGE, "python") if "localhost" in block]
    answers = [json.loads(ran(server, program)) for program in programs]
    likeliest = LM.logits(np.array([[5, 6, 7]]))[0, -1].argmax()
    assert answers == [likeliest, [[3.0, -1.0], [7.5, -1.5]]]


OWN = """
import mxnet as mx

def predict_fn(data, model):
    assert isinstance(model, mx.mod.Module) and isinstance(data, mx.io.NDArrayIter)
    return model.predict(data) * 2
"""


def test_a_script_around_a_checkpoint_may_leave_functions_out(server: Server) -> None:
    """What it gets: handlers/tensors/test_symbol.py."""
    (sums(server.store / "own") / "code").mkdir()
    (server.store / "own" / "code" / "inference.py").write_text(OWN, encoding="utf-8")
    for kind, body, wanted in (
        ("text/csv", b"1,2", "[[6.0,-2.0]]"),
        ("application/json", b"[[1,2],[3,4.5]]", "[[6.0,-2.0],[15.0,-3.0]]"),
    ):
        answer = server.predict("own", body, **{"Content-Type": kind})
        assert (answer.status_code, answer.text) == (200, wanted)
    assert error(server.predict("own", [[1, 2, 3]]))[0] == 400
    told = server.get("/v2/models/own").json()
    assert told == {
        "name": "own", "versions": ["1"], "platform": "", "inputs": [], "outputs": [],
    }  # fmt: skip
