from __future__ import annotations

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from common.errors import ArtifactError, DeadlineExceeded, InvalidRequest, NeverFits, OutOfMemory
from common.media_types import BINARY, HEADER_SIZE, JSON
from common.memory import Memory
from handlers.dispatch import handler_for
from handlers.tensors import admission, onnx_graph, tensor_model
from tests.handlers.tensors.graphs import TinyLM, identity, save_graph
from tests.processes import no_thread_starts

F, I64 = TensorProto.FLOAT, TensorProto.INT64
LM = TinyLM()
IDS = np.array([[1, 2, 3], [4, 5, 6]])


def ask(model: Any, value: Any, accept: str | None = None) -> Any:
    body, kind = onnx_graph.transform_fn(model, json.dumps(value).encode(), JSON, accept, 10)
    return json.loads(body) if kind == JSON else body


def check(model: Any, ids: Any) -> None:
    """The model answers with `LM`'s logits."""
    value = {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}
    np.testing.assert_allclose(ask(model, value), LM.logits(ids), atol=1e-4)


@pytest.mark.parametrize("place", ["model.onnx", "1/model.onnx", "gpt2/3/model.onnx"])
def test_a_graph_is_found_and_computes(tmp_path: Path, place: str) -> None:
    LM.save(tmp_path / place)
    handler: Any = handler_for(str(tmp_path))
    assert not handler.IN_ENGINE
    check(handler.model_fn(str(tmp_path), "봄#012345-1"), IDS)


def test_the_highest_version_of_a_single_model_is_served(tmp_path: Path) -> None:
    for version in ("2", "10", "notes"):
        identity(tmp_path / "a" / version / "model.onnx", F, [1])
    model = onnx_graph.model_fn(str(tmp_path))
    assert onnx_graph.describe(model)["versions"] == ["10"]
    identity(tmp_path / "b" / "1" / "model.onnx", F, [1])
    with pytest.raises(ArtifactError, match="one model, but this one holds a, b"):
        onnx_graph.model_fn(str(tmp_path))


def test_a_graph_beside_weights_of_a_text_model_is_not_served(tmp_path: Path) -> None:
    identity(tmp_path / "model.onnx", F, [1])
    for companion in ("kogpt2.params", "model.safetensors", "a.spiece"):
        (tmp_path / companion).touch()
        assert handler_for(str(tmp_path)) is not onnx_graph
        (tmp_path / companion).unlink()


def test_weights_may_lie_in_files_beside_the_graph(tmp_path: Path) -> None:
    LM.save(
        tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=512
    )
    model = onnx_graph.model_fn(str(tmp_path))
    check(model, IDS)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ArtifactError, match=r"model.onnx cannot be loaded"):
        onnx_graph.model_fn(str(tmp_path))


@pytest.mark.parametrize("location", ["../secret.bin", "/secret.bin", "link.bin"])
def test_weights_outside_of_the_artifact_are_not_read(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "artifact"
    path = identity(folder / "model.onnx", F, [2])
    (tmp_path / "secret.bin").write_bytes(np.array([1, 2], np.float32).tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    location = str(tmp_path) + location if location.startswith("/") else location
    model = onnx.load(str(path))
    weight = TensorProto(name="w", dims=[2], data_type=F, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    model.graph.initializer.append(weight)
    model.graph.node.append(helper.make_node("Add", ["x", "w"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", F, [2]))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=r"model.onnx cannot be loaded"):
        onnx_graph.model_fn(str(folder))


def test_a_damaged_graph_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = LM.save(tmp_path / "model.onnx")
    for damaged in (b"", b"no graph", path.read_bytes()[:4000]):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"^model.onnx cannot be loaded: .+") as caught:
            onnx_graph.model_fn(str(tmp_path))
        assert "\n" not in caught.value.message
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("Nope", ["x"], ["y"]), "Nope"),
        (helper.make_node("Mine", ["x"], ["y"], domain="my.ops"), "my.ops"),
        (helper.make_node("Add", ["x", "absent"], ["y"]), "absent"),
    ],
)
def test_an_unknown_operator_or_value_is_named(tmp_path: Path, node: Any, message: str) -> None:
    path = save_graph(tmp_path / "model.onnx", [node], [("x", F, [1])], [("y", F, [1])])
    model = onnx.load(str(path))
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=message):
        onnx_graph.model_fn(str(tmp_path))


@pytest.mark.parametrize(
    ("datatype", "kind", "values"),
    [
        ("BOOL", TensorProto.BOOL, [True, False]),
        ("INT8", TensorProto.INT8, [-128, 127]),
        ("UINT8", TensorProto.UINT8, [0, 255]),
        ("INT32", TensorProto.INT32, [-(2**31), 2**31 - 1]),
        ("INT64", TensorProto.INT64, [-(2**63), 2**63 - 1]),
        ("UINT64", TensorProto.UINT64, [0, 2**64 - 1]),
        ("UINT64", TensorProto.UINT64, [2**63, 1]),
        ("FP16", TensorProto.FLOAT16, [0.5, -65504.0]),
        ("FP32", TensorProto.FLOAT, [0.1, 3.4e38]),
        ("FP64", TensorProto.DOUBLE, [0.1, 1e308]),
        ("BYTES", TensorProto.STRING, ["산에는 꽃", "🌸", ""]),
    ],
)
def test_each_datatype_passes_through(
    tmp_path: Path, datatype: str, kind: int, values: list[Any]
) -> None:
    identity(tmp_path / "model.onnx", kind, ["n"])
    model = onnx_graph.model_fn(str(tmp_path))
    given = {"name": "x", "shape": [len(values)], "datatype": datatype, "data": values}
    assert ask(model, {"inputs": [given]})["outputs"] == [{**given, "name": "y"}]


def test_only_requested_outputs_are_sent_in_that_order_and_only_tensors(tmp_path: Path) -> None:
    nodes = [helper.make_node(kind, ["x"], [kind]) for kind in ("Neg", "Abs", "Exp")]
    outputs = [(kind, F, ["n"]) for kind in ("Neg", "Abs", "Exp")]
    path = save_graph(tmp_path / "model.onnx", nodes, [("x", F, ["n"])], outputs)
    graph = onnx.load(str(path))
    graph.graph.node.append(helper.make_node("SequenceConstruct", ["x"], ["s"]))
    graph.graph.output.append(helper.make_tensor_sequence_value_info("s", F, None))
    path.write_bytes(graph.SerializeToString())
    model = onnx_graph.model_fn(str(tmp_path))
    value = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [-2]}]}
    answer = ask(model, {**value, "outputs": [{"name": "Abs"}, {"name": "Neg"}]})["outputs"]
    assert [(o["name"], o["data"]) for o in answer] == [("Abs", [2.0]), ("Neg", [2.0])]
    assert set(ask(model, {"x": [-2]})) == {"Neg", "Abs", "Exp"}
    with pytest.raises(InvalidRequest, match=r"output s is no tensor but seq\(tensor\(float\)\)"):
        ask(model, {**value, "outputs": [{"name": "s"}]})


def test_inputs_that_do_not_fit_together_are_refused_with_the_right_ones(tmp_path: Path) -> None:
    LM.save(tmp_path / "model.onnx")
    model = onnx_graph.model_fn(str(tmp_path))
    for ids, mask in (([[1, 2]], [[1, 1, 1]]), ([[1, 99]], [[1, 1]])):
        with pytest.raises(InvalidRequest, match="it takes input_ids INT64 \\[batch") as caught:
            ask(model, {"input_ids": ids, "attention_mask": mask})
        assert "onnxruntime_src" not in caught.value.message
    with pytest.raises(InvalidRequest, match="attention_mask is missing"):
        ask(model, {"input_ids": [[1]]})
    with pytest.raises(InvalidRequest, match="모름 is not known"):
        ask(model, {"input_ids": [[1]], "attention_mask": [[1]], "모름": 1})


def test_a_tensor_may_have_a_dimension_of_zero(tmp_path: Path) -> None:
    identity(tmp_path / "model.onnx", F, ["b", "t", 2])
    model = onnx_graph.model_fn(str(tmp_path))
    x = {"name": "x", "shape": [1, 0, 2], "datatype": "FP32", "data": []}
    assert ask(model, {"inputs": [x]})["outputs"] == [{**x, "name": "y"}]


def test_a_graph_without_inputs_takes_an_empty_object(tmp_path: Path) -> None:
    node = helper.make_node("Constant", [], ["y"], value_floats=[1.0, 2.0])
    save_graph(tmp_path / "model.onnx", [node], [], [("y", F, [2])])
    model = onnx_graph.model_fn(str(tmp_path))
    assert ask(model, {}) == [1.0, 2.0]
    for kind in ("text/csv", f"{BINARY};{HEADER_SIZE}=0", "image/png"):
        with pytest.raises(InvalidRequest, match="the model takes no inputs"):
            onnx_graph.transform_fn(model, "봄".encode(), kind, None, 10)


def counting(path: Path) -> Path:
    """A graph that counts to `x`, one step after the other."""
    i64 = helper.make_tensor_value_info
    one = helper.make_node("Constant", [], ["one"], value_int=1)
    body = helper.make_graph(
        [one, helper.make_node("Identity", ["go_on"], ["still"]),
         helper.make_node("Add", ["n", "one"], ["more"])],
        "body",
        [i64("i", I64, []), i64("go_on", TensorProto.BOOL, []), i64("n", I64, [])],
        [i64("still", TensorProto.BOOL, []), i64("more", I64, [])],
    )  # fmt: skip
    nodes = [
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Loop", ["x", "", "zero"], ["y"], body=body),
    ]
    return save_graph(path, nodes, [("x", I64, [])], [("y", I64, [])])


def test_a_run_is_ended_at_its_timeout(tmp_path: Path) -> None:
    counting(tmp_path / "model.onnx")
    model = onnx_graph.model_fn(str(tmp_path))
    assert ask(model, 1000) == 1000
    with pytest.raises(DeadlineExceeded):  # it would go on for years; `run` returns when it ends
        onnx_graph.transform_fn(model, b"9000000000000000000", JSON, None, 0.5)
    assert ask(model, 1000) == 1000


def test_a_wait_for_a_slot_shortens_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(tmp_path / "model.onnx", F, [1])
    model = onnx_graph.model_fn(str(tmp_path))
    now_s, timeouts_s = 100.0, []
    clock = SimpleNamespace(monotonic=lambda: now_s)

    class Taken(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            nonlocal now_s
            now_s += 8
            return super().acquire(blocking, timeout)

    class Timer(threading.Timer):
        def __init__(self, interval: float, *arguments: Any) -> None:
            timeouts_s.append(interval)
            super().__init__(interval, *arguments)

    monkeypatch.setattr(model, "_slots", Taken())
    for module in (onnx_graph, tensor_model):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(threading, "Timer", Timer)
    assert ask(model, [1]) == [1.0]
    assert timeouts_s == [10 - 8]


def test_concurrent_requests_get_their_own_answers_and_a_run_starts_no_thread(
    tmp_path: Path,
) -> None:
    LM.save(tmp_path / "model.onnx")
    model = onnx_graph.model_fn(str(tmp_path))
    with no_thread_starts():
        check(model, IDS)
    before = threading.active_count()
    prompts = [np.array([[i % 40, 3, i % 7]]) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(functools.partial(check, model), prompts))
    assert threading.active_count() < before + 12  # the timers of requests end with them


# Memory


def test_the_container_and_the_machine_both_limit_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "container_memory", lambda: Memory(1 << 30, 700 << 20))
    assert admission.available_bytes() == (1024 - 700) << 20
    monkeypatch.setattr(admission, "container_memory", lambda: None)
    assert 0 < admission.available_bytes() < psutil.virtual_memory().total


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LM.save(tmp_path / "model" / "model.onnx")
    monkeypatch.setattr(admission, "container_memory", lambda: Memory(1 << 30, 980 << 20))
    with pytest.raises(OutOfMemory, match=r"needs about 6\d MiB, .* only 0 are left") as caught:
        onnx_graph.model_fn(str(tmp_path / "model"))
    assert not isinstance(caught.value, NeverFits)
    (tmp_path / "model" / "weights.bin").touch()
    with (tmp_path / "model" / "weights.bin").open("r+b") as file:
        file.truncate(1 << 42)  # takes no room on disk
    with pytest.raises(NeverFits, match="needs about"):
        onnx_graph.model_fn(str(tmp_path / "model"))
