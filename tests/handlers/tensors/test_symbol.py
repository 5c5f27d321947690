from __future__ import annotations

import contextlib
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError, DeadlineExceeded, InvalidRequest, UnsupportedMediaType
from common.media_types import JSON
from handlers.dispatch import handler_for
from handlers.tensors.codec import CSV, NPY
from tests.handlers.tensors.graphs import classifier, npy, save_checkpoint
from tests.lazy import mx, symbol, symbol_module

SIZE, CLASSES = 16, 5


def images(count: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal((count, 3, SIZE, SIZE))
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifier")


@pytest.fixture(scope="module")
def direct(folder: Path) -> Any:
    bound = classifier(folder)
    return lambda x: bound(data=x)[0]


@pytest.fixture(scope="module")
def model(folder: Path, direct: Any) -> Any:
    return symbol.model_fn(str(folder), "봄#012345-1")


@pytest.fixture
def copy(folder: Path, direct: Any, tmp_path: Path) -> Path:
    """An artifact that a test may break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def ask(model: Any, body: bytes, kind: str = JSON, accept: str | None = None) -> Any:
    answer, content_type = symbol.transform_fn(model, body, kind, accept, 30)
    if content_type == JSON:
        return np.array(json.loads(answer))
    if content_type == NPY:
        return np.load(io.BytesIO(answer), allow_pickle=False)
    return np.loadtxt(io.BytesIO(answer), delimiter=",", ndmin=2)


def csv(array: Any) -> bytes:
    return "\n".join(",".join(map(str, row.ravel().tolist())) for row in array).encode()


def as_json(array: Any) -> bytes:
    return json.dumps(array.tolist()).encode()


@pytest.mark.parametrize(
    ("rows", "encode", "kind", "accept"),
    [(1, as_json, JSON, NPY), (2, csv, CSV, JSON), (7, npy, NPY, CSV)],
)
def test_images_in_any_number_and_format_are_classified_as_by_a_direct_bind(
    model: Any, direct: Any, rows: int, encode: Any, kind: str, accept: str
) -> None:
    x = images(rows)
    answer = ask(model, encode(x), kind, accept)
    assert answer.shape == (rows, CLASSES)
    np.testing.assert_allclose(answer, direct(x), atol=1e-6)


def test_the_open_inference_protocol(model: Any, direct: Any) -> None:
    x = images(1)
    given = {"name": "data", "shape": list(x.shape), "datatype": "FP32"}
    body = json.dumps({"inputs": [{**given, "data": x.ravel().tolist()}]}).encode()
    answer, _ = symbol.transform_fn(model, body, JSON, None, 30)
    (output,) = json.loads(answer)["outputs"]
    np.testing.assert_allclose([output.pop("data")], direct(x), atol=1e-6)
    described = symbol.describe(model)
    assert described.pop("inputs") == [{**given, "shape": [-1, 3, SIZE, SIZE]}]
    assert described.pop("outputs") == [{**output, "shape": [-1, CLASSES]}]
    assert output == {"name": "softmax_output", "datatype": "FP32", "shape": [1, CLASSES]}
    assert described == {"name": "봄", "versions": ["1"], "platform": "mxnet_symbol"}


def test_a_batch_without_rows_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest, match="has no rows"):
        ask(model, npy(images(0)), NPY)


def test_concurrent_requests_get_their_own_answers(model: Any, direct: Any) -> None:
    batches = [images(1 + seed % 3, seed) for seed in range(60)]
    wanted = [direct(x) for x in batches]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda x: ask(model, npy(x), NPY, NPY), batches))
    for answer, expected in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_a_request_waits_for_a_slot_no_longer_than_its_timeout(model: Any) -> None:
    with contextlib.ExitStack() as slots:
        for _ in range(model._slots._value):
            slots.enter_context(model._slots)
        with pytest.raises(DeadlineExceeded):
            symbol.transform_fn(model, npy(images(1)), NPY, None, 0.1)
    assert len(ask(model, npy(images(1)), NPY)) == 1


@pytest.mark.parametrize(
    ("rows", "shape"), [(1, (1, 28, 28)), (3, (28, 28)), (3, (784,)), (1, (7, 4, 28))]
)
def test_a_graph_that_flattens_takes_any_rank(
    digits: tuple[Path, Any], rows: int, shape: tuple[int, ...]
) -> None:
    folder, bound = digits
    model, module = symbol.model_fn(str(folder)), symbol_module.model_fn(str(folder))
    x = np.random.default_rng(0).random((rows, *shape), np.float32)
    expected = bound(data=x.reshape(rows, 1, 28, 28))[0]
    np.testing.assert_allclose(ask(model, as_json(x)), expected, atol=1e-6)
    for _ in range(2):  # the second one, after the module was bound to another shape
        given = symbol_module.input_fn(as_json(x), JSON, module)
        prediction = symbol_module.predict_fn(given, module, 30)
        np.testing.assert_allclose(prediction.asnumpy(), expected, atol=1e-6)
        assert module.data_shapes[0].shape == (1, 1, 28, 28)


@pytest.mark.parametrize("shape", [(28, 28), (784,), (1, 27, 28), (1, 0, 28), (0, 28, 28), ()])
def test_shapes_that_mxnet_refuses_are_refused_with_the_right_shape(
    digits: tuple[Path, Any], shape: tuple[int, ...]
) -> None:
    folder, _ = digits
    model, module = symbol.model_fn(str(folder)), symbol_module.model_fn(str(folder))
    body = npy(np.zeros(shape, np.float32))
    for run in (
        lambda: symbol.transform_fn(model, body, NPY, None, 30),
        lambda: symbol_module.input_fn(body, NPY, module),
    ):
        with pytest.raises(InvalidRequest, match=r"must be FP32 \[batch, 1, 28, 28\]"):
            run()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """MNIST's two layers, as SageMaker's examples have them."""
    folder = tmp_path_factory.mktemp("digits")
    x = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.Variable("data")), num_hidden=8, name="fc1")
    net = mx.sym.FullyConnected(mx.sym.Activation(x, act_type="relu"), num_hidden=10, name="fc2")
    return folder, save_checkpoint(folder, net, {"data": (100, 1, 28, 28)})


# Other graphs


def test_a_graph_with_a_fixed_batch_size_gets_padded_batches(tmp_path: Path) -> None:
    x = mx.sym.reshape(mx.sym.Variable("data"), shape=(2, 6))  # whatever comes
    net = mx.sym.FullyConnected(x, num_hidden=3, name="fc")
    bound = save_checkpoint(tmp_path, net, {"data": (2, 2, 3)})
    model = symbol.model_fn(str(tmp_path))
    x = np.random.default_rng(0).random((5, 2, 3), np.float32)
    halves = [bound(data=x[:2])[0], bound(data=x[2:4])[0], bound(data=x[[4, 4]])[0][:1]]
    np.testing.assert_allclose(ask(model, as_json(x)), np.concatenate(halves), atol=1e-6)


def test_inputs_and_outputs_may_be_several(tmp_path: Path) -> None:
    a, b = mx.sym.Variable("a"), mx.sym.Variable("b")
    net = mx.sym.Group([a + b, mx.sym.FullyConnected(a, num_hidden=2, name="fc")])
    bound = save_checkpoint(tmp_path, net, {"a": (1, 3), "b": (1, 3)})
    model = symbol.model_fn(str(tmp_path))
    x = {"a": np.ones((2, 3), np.float32), "b": np.full((2, 3), 2, np.float32)}
    body = json.dumps({name: array.tolist() for name, array in x.items()}).encode()
    answer = json.loads(symbol.transform_fn(model, body, JSON, None, 30)[0])
    assert list(answer) == [o["name"] for o in symbol.describe(model)["outputs"]]
    for found, expected in zip(answer.values(), bound(**x), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    body = json.dumps({"a": x["a"].tolist(), "b": x["b"][:1].tolist()}).encode()
    with pytest.raises(InvalidRequest, match="different numbers of rows"):
        symbol.transform_fn(model, body, JSON, None, 30)


def test_inputs_without_a_batch_dimension_must_have_the_shape_of_the_file(tmp_path: Path) -> None:
    net = mx.sym.sum(mx.sym.Variable("data"), axis=0)
    save_checkpoint(tmp_path, mx.sym.FullyConnected(net, num_hidden=2), {"data": (3, 4, 1)})
    model = symbol.model_fn(str(tmp_path))
    assert ask(model, as_json(np.ones((3, 4, 1)))).shape == (4, 2)
    with pytest.raises(InvalidRequest, match=r"must be FP32 \[3, 4, 1\]"):
        ask(model, as_json(np.ones((2, 4, 1))))


def test_half_precision_weights_take_half_precision(tmp_path: Path) -> None:
    net = mx.sym.broadcast_mul(mx.sym.Variable("data"), mx.sym.Variable("scale"))
    args = {"scale": 2 * mx.nd.ones((1, 3), dtype="float16")}
    mx.model.save_checkpoint(str(tmp_path / "model"), 0, net, args, {})
    (tmp_path / "model-shapes.json").write_text('[{"shape": [1, 3], "name": "data"}]')
    model = symbol.model_fn(str(tmp_path))
    assert symbol.describe(model)["inputs"][0]["datatype"] == "FP16"
    assert ask(model, b"[[1, 2, 3]]").tolist() == [[2.0, 4.0, 6.0]]


# Artifacts


def test_the_files_may_lie_in_a_folder_named_model(copy: Path, direct: Any, tmp_path: Path) -> None:
    (copy / "kogpt2.spiece").touch()  # an exported KoGPT2
    assert handler_for(str(copy)).__name__ != "handlers.tensors.symbol"
    (copy / "kogpt2.spiece").unlink()
    (tmp_path / "artifact").mkdir()
    copy.rename(tmp_path / "artifact" / "model")
    assert handler_for(str(tmp_path / "artifact")).__name__ == "handlers.tensors.symbol"
    model = symbol.model_fn(str(tmp_path / "artifact"))
    np.testing.assert_allclose(ask(model, npy(images(1)), NPY), direct(images(1)), atol=1e-6)


def wrong(file: str, content: Any) -> Any:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / f"model-{file}").write_text(text, encoding="utf-8")


def graph(op: str, **attributes: str) -> Any:
    data = {"op": "null", "name": "data", "inputs": []}
    node = {"op": op, "name": "y", "attrs": attributes, "inputs": [[0, 0, 0]]}
    return {"nodes": [data, node], "arg_nodes": [0], "heads": [[1, 0, 0]]}


def nested(inner: Any, depth: int = 1) -> Any:
    """The graph within the node of one, as MXNet saves loops."""
    for _ in range(depth):
        outer = graph("_foreach", num_args="1", num_outputs="1", num_out_data="1")
        outer["nodes"][1]["subgraphs"] = [inner]
        inner = outer
    return inner


LIKE = "model-shapes.json must be like"


def remove(file: str) -> Any:
    return lambda folder: (folder / f"model-{file}").unlink()


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (remove("shapes.json"), 'model-shapes.json missing: .*"shape": \\[1, 2\\]'),
        (remove("0000.params"), "model-0000.params missing"),
        (wrong("shapes.json", "{"), LIKE),
        (wrong("shapes.json", []), LIKE),
        (
            wrong("shapes.json", [{"shape": [0, 2], "name": "data"}]),
            LIKE,
        ),
        (wrong("shapes.json", [{"shape": "1", "name": "data"}]), LIKE),
        (
            wrong("shapes.json", [{"shape": [1, 3, 16, 16], "name": "사진"}]),
            "names 사진, but .* data",
        ),
        (wrong("shapes.json", [{"shape": [1, 3, 32, 32], "name": "data"}]), r"fc_weight has shape"),
        (wrong("shapes.json", [{"shape": [1, 3], "name": "data"}]), "cannot compute"),
        (wrong("symbol.json", "{"), "not the JSON of an MXNet symbol"),
        (wrong("symbol.json", [1]), "not the JSON of an MXNet symbol"),
        (wrong("symbol.json", graph("Nope")), "Operator Nope is not registered"),
        (wrong("symbol.json", graph("Custom", op_type="mine")), "operator Custom, .*inference.py"),
        (wrong("symbol.json", graph("_npi_Custom", op_type="mine")), "operator _npi_Custom, "),
        (wrong("symbol.json", graph("_Native", info="0")), "operator _Native"),
        (wrong("symbol.json", nested(graph("_Native", info="0x1"))), "operator _Native"),
        (wrong("symbol.json", nested(graph("_NDArray", info="0x1"), 3)), "operator _NDArray"),
        (
            wrong("symbol.json", '{"nodes": [{"op": "_Native", "op": "null", "name": "data"}]}'),
            "operator _Native",
        ),
        (wrong("0000.params", "garbage" * 10), "not an MXNet .params file"),
        (wrong("0000.params", ""), "too short"),
    ],
)
def test_a_broken_artifact_is_told_in_a_sentence(copy: Path, breaks: Any, message: str) -> None:
    breaks(copy)
    with pytest.raises(ArtifactError, match=message) as caught:
        handler_for(str(copy)).model_fn(str(copy))
    assert "\n" not in caught.value.message


def test_a_missing_weight_is_named(copy: Path) -> None:
    saved = mx.nd.load(str(copy / "model-0000.params"))
    del saved["arg:fc_bias"], saved["aux:bn0_moving_mean"]
    mx.nd.save(str(copy / "model-0000.params"), saved)
    with pytest.raises(ArtifactError, match="lacks bn0_moving_mean, fc_bias"):
        symbol.model_fn(str(copy))


# Around scripts that leave functions out


@pytest.fixture(scope="module")
def module(folder: Path, direct: Any) -> Any:
    return symbol_module.model_fn(str(folder))


def test_a_scripts_own_functions_may_give_arrays_and_forward_by_themselves(
    module: Any, direct: Any
) -> None:
    for kind in (np.asarray, mx.nd.array):
        prediction = symbol_module.predict_fn(kind(images(4)), module, 30)
        np.testing.assert_allclose(prediction.asnumpy(), direct(images(4)), atol=1e-6)
    module.forward(mx.io.DataBatch([mx.nd.array(images(1))]), is_train=False)
    body, _ = symbol_module.output_fn(module.get_outputs()[0], NPY)
    np.testing.assert_allclose(np.load(io.BytesIO(body)), direct(images(1)), atol=1e-6)


def test_a_module_is_bound_to_one_row_or_as_the_file_says(tmp_path: Path, module: Any) -> None:
    assert module.data_shapes[0].shape == (1, 3, SIZE, SIZE)
    x = mx.sym.reshape(mx.sym.Variable("data"), shape=(2, 6))
    net = mx.sym.FullyConnected(x, num_hidden=3, name="fc")
    bound = save_checkpoint(tmp_path, net, {"data": (2, 2, 3)})
    fixed = symbol_module.model_fn(str(tmp_path))
    assert fixed.data_shapes[0].shape == (2, 2, 3)
    rows = np.random.default_rng(0).random((3, 2, 3), np.float32)
    for count in (1, 2):
        given = symbol_module.input_fn(npy(rows[:count]), NPY, fixed)
        answer = symbol_module.predict_fn(given, fixed, 30).asnumpy()
        wanted = bound(data=np.resize(rows[:count], (2, 2, 3)))[0][:count]
        np.testing.assert_allclose(answer, wanted, atol=1e-6)


def test_a_script_gets_the_same_errors_as_a_model_without_one(module: Any, copy: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be FP32"):
        symbol_module.input_fn("[[1, 2]]", JSON, module)
    with pytest.raises(UnsupportedMediaType):
        symbol_module.input_fn(b"", "image/png", module)
    (copy / "model-0000.params").write_bytes(b"garbage")
    with pytest.raises(ArtifactError, match="does not hold"):
        symbol_module.model_fn(str(copy))
