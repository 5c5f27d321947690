"""The default functions for those that a script leaves out, by the kind of its model."""

from __future__ import annotations

import io
import json
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import mxnet_compat  # noqa: F401  # for `import mxnet` in scripts, as their hooks
from common.errors import EngineError, InvalidRequest
from common.media_types import JSON
from handlers.dispatch import handler_for
from handlers.tensors.codec import NPY
from handlers.user_code.conventions.detect import service_of
from handlers.user_code.entry_point import Script
from handlers.user_code.messages import Answer, Part, Request
from tests.handlers.tensors.graphs import classifier, npy

Ask = Callable[..., Answer]
EMPTY = "# only a comment\n\nfrom __future__ import absolute_import\n"
IMAGES = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)


def loaded(folder: Path, source: str) -> Ask:
    """Loads a model's script in this process; the function raises an answer that is an error."""
    module = types.ModuleType("script")
    exec(compile(source, "inference.py", "exec"), module.__dict__)  # noqa: S102
    service = service_of(module, Script(folder, folder / "inference.py").spec("봄"))
    service.load()

    def ask(body: bytes, kind: str = JSON, accept: str = JSON) -> Answer:
        headers = {"content-type": kind, "accept": accept}
        (answer,) = service.answer([Request("1", headers, [Part("body", kind, body)])], 30.0)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    return ask


def array(answer: Any) -> Any:
    if answer.content_type == NPY:
        return np.load(io.BytesIO(answer.body))
    return np.array(json.loads(answer.body))


# Entry points without functions


@pytest.mark.parametrize("program", ["inference.py", "empty_module.py"])
def test_a_file_without_code_is_no_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    if program != "inference.py":
        monkeypatch.setenv("SAGEMAKER_PROGRAM", program)
        (tmp_path / "inference.py").write_text("raise SystemExit('another entry point')")
    (tmp_path / "code").mkdir()
    for source in ("", EMPTY, "\n# 주석뿐\r\n", "\ufeff# BOM\n"):
        (tmp_path / "code" / program).write_text(source, encoding="utf-8")
        assert not isinstance(handler_for(str(tmp_path)), Script)
    for source in ("import logging\n", '"""문서"""\n', "#" * 100_000, "def", "\0"):
        (tmp_path / "code" / program).write_text(source, encoding="utf-8")
        assert isinstance(handler_for(str(tmp_path)), Script)


@pytest.mark.parametrize("source", ["import logging", "def pre_model_fn(model_dir): pass"])
def test_a_script_without_functions_is_served_by_the_built_in_handler(
    tmp_path: Path, source: str
) -> None:
    run = classifier(tmp_path)
    ask = loaded(tmp_path, source)
    answer = ask(json.dumps(IMAGES.tolist()).encode())
    np.testing.assert_allclose(array(answer), run(data=IMAGES)[0], atol=1e-5)
    given = {"name": "data", "shape": list(IMAGES.shape), "datatype": "FP32"}
    body = json.dumps({"inputs": [{**given, "data": IMAGES.ravel().tolist()}]}).encode()
    (output,) = json.loads(ask(body).body)["outputs"]  # as without a script
    np.testing.assert_allclose(output["data"], run(data=IMAGES)[0].ravel(), atol=1e-5)


# MXNet's blocks and modules

DENSE = """
    import mxnet as mx

    class Net(mx.gluon.{kind}):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense = mx.gluon.nn.Dense(2, in_units=3)

        def {forward}:
            return self.dense(x)

    def model_fn(model_dir):
        net = Net()
        net.initialize(mx.init.One())
        return net
"""
BLOCK = textwrap.dedent(DENSE.format(kind="Block", forward="forward(self, x)"))
HYBRID = textwrap.dedent(DENSE.format(kind="HybridBlock", forward="hybrid_forward(self, F, x)"))
ROWS, SUMS = [[1.0, 2.0, 3.0]], [[6.0, 6.0]]


@pytest.mark.parametrize(
    "source",
    [
        BLOCK,
        HYBRID,
        HYBRID + "def predict_fn(data, net): return net(data)",
        HYBRID + "import json\ndef input_fn(body, kind): return mx.nd.array(json.loads(body))",
        HYBRID + "import json\ndef output_fn(y, accept): return json.dumps(y.asnumpy().tolist())",
        HYBRID + "def predict_fn(data, net): return net(data).asnumpy().tolist()",
    ],
)
def test_a_gluon_block_is_run_by_the_defaults_for_what_a_script_leaves_out(
    tmp_path: Path, source: str
) -> None:
    ask = loaded(tmp_path, source)
    assert array(ask(b"[[1, 2, 3]]")).tolist() == SUMS
    if "_fn" not in source.replace("def model_fn", ""):
        for accept in (JSON, NPY):
            answer = ask(npy(ROWS), NPY, accept)
            assert (answer.content_type, array(answer).tolist()) == (accept, SUMS)


def test_several_outputs_of_a_block_come_by_number(tmp_path: Path) -> None:
    own = "\nNet.hybrid_forward = lambda self, F, x, **_: (self.dense(x), x)\n"
    answer = loaded(tmp_path, HYBRID + own)(b"[[1, 2, 3]]")
    assert json.loads(answer.body) == {"output0": SUMS, "output1": ROWS}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[[1, 2]]", "the model cannot compute this"),
        (b"[[1, 2], [3]]", "the body is not application/json"),
        (b'[["\xea\xb0\x80"]]', "must be numbers"),
        (b'{"a": 1}', "must be numbers"),
    ],
)
def test_input_that_a_block_cannot_compute_is_a_client_error(
    tmp_path: Path, body: bytes, message: str
) -> None:
    ask = loaded(tmp_path, HYBRID)
    with pytest.raises(InvalidRequest, match=message):
        ask(body)
    assert array(ask(b"[[1, 2, 3]]")).tolist() == SUMS


MODULE = """
import mxnet as mx

def model_fn(model_dir):
    symbol, arguments, states = mx.model.load_checkpoint(model_dir + "/model", 0)
    module = mx.mod.Module(symbol, label_names=None)
    module.bind(data_shapes=[("data", (1, 3, 16, 16))], for_training=False)
    module.set_params(arguments, states, allow_missing=True)
    return module
"""


@pytest.mark.parametrize(
    "own",
    [
        "",
        "def predict_fn(data, module): return module.predict(data)",
        "import json\n"
        "def input_fn(body, kind, model):\n"
        "    size = model.data_shapes[0].shape[0]\n"
        "    return mx.io.NDArrayIter(mx.nd.array(json.loads(body)), batch_size=size)",
    ],
)
def test_a_module_is_run_by_the_defaults(tmp_path: Path, own: str) -> None:
    run = classifier(tmp_path)
    ask = loaded(tmp_path, MODULE + own)
    np.testing.assert_allclose(
        array(ask(json.dumps(IMAGES.tolist()).encode())), run(data=IMAGES)[0], atol=1e-5
    )


def test_other_models_need_a_predict_fn(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="Please provide a predict_fn") as caught:
        loaded(tmp_path, "def model_fn(model_dir): return 1")
    assert caught.value.status == 400
