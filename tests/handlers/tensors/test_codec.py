"""Tensors as JSON, CSV and NPY, and the Open Inference Protocol's requests of tensors."""

from __future__ import annotations

import io
import json
import pickle
import struct
from typing import Any

import numpy as np
import pytest

from common.errors import EngineError, InvalidRequest, NotAcceptable, UnsupportedMediaType
from common.media_types import BINARY, HEADER_SIZE, JSON
from handlers.model_spec import client_name
from handlers.tensors import codec, tensor_model, v2
from handlers.tensors.codec import CSV, NPY, TensorSpec
from tests.handlers.tensors.graphs import npy
from tests.processes import python

IMAGE = TensorSpec("data", "FP32", ("batch", 2, 3))
ROWS = TensorSpec("data", "FP32", ("batch", 2))
IDS = TensorSpec("input_ids", "INT64", ("batch", "sequence"))
WIDE = TensorSpec("ids", "UINT64", ("batch", "sequence"))
TEXTS = TensorSpec("text", "BYTES", ("batch",))
VALUES = np.arange(12, dtype=np.float32).reshape(2, 2, 3)


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        (json.dumps(VALUES.tolist()).encode(), JSON),
        (json.dumps(VALUES.astype(int).tolist()).encode(), JSON),
        (b"0,1,2,3,4,5\n6,7,8,9,10,11\n", CSV),
        (b"0,1,2\r\n3,4,5\r\n\r\n6,7,8\r\n9,10,11", CSV),
        (b"\xef\xbb\xbf0, 1,2,3,4,5,6,7,8,9,1e1,11.0", CSV),
        (npy(VALUES), NPY),
        (npy(VALUES.astype(np.float64)), NPY),
        (npy(VALUES.astype(">i2")), NPY),
        (npy(np.asfortranarray(VALUES)), NPY),
    ],
)
def test_the_same_numbers_in_every_form(body: bytes, media_type: str) -> None:
    array = codec.decode(body, media_type, IMAGE)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, VALUES)


def test_csv_of_tokens_has_a_line_for_each_row() -> None:
    array = codec.decode(b"1,2,3\n4,5,6", CSV, IDS)
    assert (array.dtype, array.tolist()) == (np.int64, [[1, 2, 3], [4, 5, 6]])
    assert codec.decode(b"9007199254740993", CSV, IDS).tolist() == [[9007199254740993]]


@pytest.mark.parametrize(
    ("shape", "lines"), [((0,), 0), ((0, 2), 0), ((2, 0), 2), ((), 1), ((3,), 3)]
)
def test_csv_has_a_line_for_each_row_also_of_an_empty_array(
    shape: tuple[int, ...], lines: int
) -> None:
    for kind in ("f4", object):
        assert codec.encode({"x": np.zeros(shape, kind)}, CSV).count(b"\n") == lines


@pytest.mark.parametrize(
    ("body", "media_type", "spec", "message"),
    [
        (b"[[1, NaN]]", JSON, ROWS, "not JSON"),
        (b"[[1, 1e999]]", JSON, ROWS, "not JSON"),
        (b"[[1, 1e300]]", JSON, ROWS, "1e+300, out of range for FP32"),
        (b"[[1, null]]", JSON, ROWS, "no numbers, must be FP32 [batch, 2]"),
        (b'[[1, "2"]]', JSON, ROWS, "no numbers, must be FP32 [batch, 2]"),
        (b'[["\xea\xb0\x80", "\xeb\x82\x98"]]', JSON, ROWS, "no numbers"),
        (b"[[1, 2], [3]]", JSON, ROWS, "rows of different lengths, must be FP32 [batch, 2]"),
        (b"[1, 2]", JSON, ROWS, "data has shape [2], must be FP32 [batch, 2]"),
        (b"[[1, 2, 3]]", JSON, ROWS, "data has shape [1, 3], must be FP32 [batch, 2]"),
        (b"[[true, false]]", JSON, ROWS, "true and false, must be FP32"),
        (b"[[1.5]]", JSON, IDS, "fractions, must be INT64"),
        (b"[[18446744073709551615]]", JSON, IDS, "18446744073709551615, out of range for INT64"),
        (b"[[18446744073709551615, -1]]", JSON, WIDE, "-1, out of range for UINT64"),
        (b'{"a": 1}', JSON, ROWS, "no numbers"),
        (b"[" * 100_000, JSON, ROWS, "not JSON"),
        (b"", JSON, ROWS, "not JSON"),
        (b"\xff", JSON, ROWS, "not UTF-8"),
        (b"", CSV, ROWS, "the body is empty"),
        (b"1,nan", CSV, ROWS, "line 1, value 2 is 'nan', must be a number"),
        (b"1,2\n3,", CSV, ROWS, "line 2, value 2 is '', must be a number"),
        ("1,둘".encode(), CSV, ROWS, "line 1, value 2 is '둘', must be a number"),
        (b"1,2,3", CSV, ROWS, "3 values, must be a multiple of 2"),
        (
            "가,나".encode(),
            CSV,
            TensorSpec("x", "BYTES", (None, 0)),
            "2 values, must be a multiple of 0",
        ),
        (b"1,2_0", CSV, ROWS, "line 1, value 2 is '2_0', must be a number"),
        (b"1_000", CSV, IDS, "line 1, value 1 is '1_000', must be an integer"),
        (b"1,2.5", CSV, IDS, "'2.5', must be an integer"),
        (b"1,2\n3", CSV, IDS, "rows of different lengths"),
        (b"\xff", CSV, ROWS, "not CSV in UTF-8"),
        (b'"1,2', CSV, ROWS, "not CSV in UTF-8"),
        (b"\x93NUMPY", NPY, ROWS, "not NPY"),
        (b"PK\x03\x04" + bytes(100), NPY, ROWS, "not NPY"),
        (b"\x93NUMPY\1\0\x28\x23" + b"-" * 9000, NPY, ROWS, "Header info length (9000)"),
        (npy(np.zeros((1, 3))), NPY, ROWS, "data has shape [1, 3], must be FP32 [batch, 2]"),
        (npy(np.zeros((1, 2)))[:-1], NPY, ROWS, "16 bytes, but holds 15"),
        (npy(np.zeros((1, 2))) + b"x", NPY, ROWS, "16 bytes, but holds 17"),
        (npy(np.zeros((1, 2), complex)), NPY, ROWS, "must be of numbers"),
        (npy(np.array([["a", "b"]])), NPY, ROWS, "must be of numbers"),
    ],
)
def test_invalid_bodies_are_refused_with_the_right_form(
    body: bytes, media_type: str, spec: TensorSpec, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(body, media_type, spec)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_npy_is_never_unpickled() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was unpickled",)

    for body in (npy(np.array([Trap()], dtype=object)), pickle.dumps(Trap())):
        with pytest.raises(InvalidRequest):
            codec.decode(body, NPY, ROWS)


def test_no_more_memory_is_taken_than_was_sent() -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 2), }"
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n"
    with pytest.raises(InvalidRequest, match="799999999992 bytes, but holds 0"):
        codec.decode(body, NPY, ROWS)


def test_memory_does_not_grow_with_the_longest_text() -> None:
    long = "가" * 100_000
    with pytest.raises(InvalidRequest, match="no numbers"):
        codec.decode(json.dumps([[0] * 100_000, [long]]).encode(), JSON, ROWS)
    answered = Same()
    body = json.dumps(["나"] * 1000 + [long]).encode()
    assert tensor_model.transform_fn(answered, body, JSON, JSON, 60)[0]
    with pytest.raises(EngineError, match="request fewer outputs"):
        tensor_model.transform_fn(answered, body, JSON, NPY, 60)


def test_the_length_of_the_json_is_a_number_of_bytes() -> None:
    for size in ("9" * 5000, "-1", "٣", "", "3"):
        kind = f"{BINARY};{HEADER_SIZE}={size}"
        with pytest.raises(InvalidRequest, match="length of the JSON"):
            tensor_model.transform_fn(Same(), b"{}", kind, None, 60)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedMediaType, match="is image/png, must be one of"):
        codec.decode(b"", "image/png", ROWS)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT8", 128), ("UINT8", -1), ("BOOL", 2), ("FP16", 70000.0), ("BYTES", 1)],
)
def test_values_beyond_their_datatype_are_refused(datatype: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=datatype):
        codec.from_values([value], TensorSpec("x", datatype, (1,)))


def test_answers_in_each_form() -> None:
    array = np.array([[0.1, 2.0], [3.0, 1e-7]], np.float32)
    texts = np.array(["가", "a,b"], dtype=object)
    assert json.loads(codec.encode({"y": array}, JSON)) == [[0.1, 2.0], [3.0, 1e-7]]
    assert codec.encode({"y": array}, CSV) == b"0.1,2.0\n3.0,1e-07\n"
    assert codec.encode({"z": texts}, CSV) == '가\n"a,b"\n'.encode()
    assert codec.encode({"y": np.float32(3).reshape(())}, CSV) == b"3.0\n"
    for value in (array, texts):
        again = np.load(io.BytesIO(codec.encode({"y": value}, NPY)), allow_pickle=False)
        assert again.tolist() == value.tolist()
    assert json.loads(codec.encode({"y": array, "z": texts}, JSON))["z"] == ["가", "a,b"]
    with pytest.raises(NotAcceptable, match="holds one tensor"):
        codec.encode({"y": array, "z": texts}, CSV)
    nan = codec.encode({"y": np.array([np.nan, -np.inf, 1], np.float32)}, JSON)
    assert nan == b"[NaN, -Infinity, 1.0]"


# The Open Inference Protocol

METADATA = v2.Metadata("m", "test", [IDS], [TensorSpec("y", "FP32", ("batch",))])


def request(**more: Any) -> dict[str, Any]:
    given = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    return {"inputs": [{**given, **more}]}


def refused(value: Any, binary: bytes, spec: TensorSpec) -> str:
    """The message about a request to a model with this input."""
    with pytest.raises(InvalidRequest) as caught:
        v2.parse(value, binary, v2.Metadata("m", "test", [spec], METADATA.outputs))
    return caught.value.message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the body must be"),
        ({"inputs": [1]}, "the body must be"),
        ({"inputs": {}}, "the body must be"),
        ({**request(), "모름": 1}, "모름 is not known; known are id, model_name, parameters, in"),
        ({**request(), "id": 5}, "id must be a string"),
        ({**request(), "parameters": [1]}, "parameters must be a JSON object"),
        ({"inputs": request()["inputs"] * 2}, "input_ids is there twice"),
        (request(name="x"), "'x' is not known; known are input_ids INT64 [batch, sequence]"),
        (request(name=5), "5 is not known"),
        (request(datatype="INT32"), "datatype 'INT32', must be INT64"),
        (request(datatype=None), "must be INT64"),
        (request(shape=[2]), "shape [2], must be INT64 [batch, sequence]"),
        (request(shape=[1, -2]), "must be a list of sizes"),
        (request(shape="1,2"), "must be a list of sizes"),
        (request(shape=[1, 3]), "2 values, but shape [1, 3] needs 3"),
        (request(shape=[2, 1], data=[[1, 2]]), "is [1, 2], but shape is [2, 1]"),
        (request(shape=[2**40, 2**40]), "2 values, but shape"),
        (request(shape=[0, 2**70], data=[]), "a shape that no array has"),
        (request(data=None), "must be a list, flat or nested"),
        (request(data=[1, "둘"]), "no numbers"),
        (request(data=[1, [2]]), "rows of different lengths"),
        (request(rows=1), "inputs.input_ids.rows is not known"),
        (request(parameters={"binary_data_size": 16}), "16, but 0 bytes are left"),
        (request(parameters={"binary_data_size": "x"}), "'x', but 0 bytes are left"),
        (request(parameters={"shared_memory_region": "r"}), "shared_memory_region"),
        ({**request(), "outputs": [{"name": "z"}]}, "output z is not known; known are y"),
        ({**request(), "outputs": ["y"]}, 'must be a list of {"name": ...}'),
        ({**request(), "outputs": {"name": "y"}}, 'must be a list of {"name": ...}'),
        (
            {**request(), "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            "classification is not supported",
        ),
    ],
)
def test_an_invalid_request_is_refused_with_the_field(value: Any, message: str) -> None:
    assert message in refused(value, b"", IDS)


@pytest.mark.parametrize(
    ("spec", "shape", "size", "data", "message"),
    [
        (IDS, [1, 2], 16, bytes(15), "16, but 15 bytes are left"),
        (IDS, [1, 2], 16, bytes(17), "1 bytes follow the last binary tensor"),
        (IDS, [2**70, 0], 0, b"", "a shape that no array has"),
        (TEXTS, [1], 3, b"\1\0\0", "text does not hold texts in UTF-8"),
        (TEXTS, [1], 5, b"\2\0\0\0a", "the last text of text is cut short"),
        (TEXTS, [1], 5, b"\1\0\0\0\xff", "text does not hold texts in UTF-8"),
        (TEXTS, [1], 6, b"\1\0\0\0ab", "text does not hold texts in UTF-8"),
        (TensorSpec("x", "BYTES", IDS.shape), [2**70, 0], 0, b"", "a shape that no array has"),
    ],
)
def test_a_damaged_binary_tensor_is_refused(
    spec: TensorSpec, shape: list[int], size: int, data: bytes, message: str
) -> None:
    tensor = {"name": spec.name, "shape": shape, "datatype": spec.datatype}
    value = {"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}
    assert message in refused(value, data, spec)


def test_data_may_be_flat_or_nested_and_parameters_for_other_servers_are_ignored() -> None:
    for data in ([1, 2], [[1, 2]]):
        assert v2.parse(request(data=data), b"", METADATA)[1]["input_ids"].tolist() == [[1, 2]]
    value = {**request(parameters={"content_type": "np"}), "parameters": {"priority": 1}}
    assert v2.parse(value, b"", METADATA)[0].outputs == {"y": False}


# Around a model


class Same:
    """A model that answers the texts that it gets."""

    metadata = v2.Metadata("m", "test", [TEXTS], [TEXTS])

    def run(self, inputs: Any, outputs: Any, timeout_s: Any) -> Any:
        return inputs


class Double:
    """y = 2 x"""

    metadata = v2.Metadata(
        "m", "test", [TensorSpec("x", "FP32", ("n",))], [TensorSpec("y", "FP32", ("n",))]
    )

    def run(self, inputs: Any, outputs: Any, timeout_s: Any) -> Any:
        return {"y": 2 * inputs["x"]}


@pytest.mark.parametrize("body", [b"[1, 2]", b'{"x": [1, 2]}'])
def test_one_tensor_may_be_sent_with_or_without_its_name(body: Any) -> None:
    for content_type in (None, "", "application/json; charset=utf-8"):
        answer = tensor_model.transform_fn(Double(), body, content_type, None, 60)
        assert answer == (b"[2.0,4.0]", JSON)


def test_an_answer_that_is_too_large_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_model, "MAX_ANSWER_BYTES", 100)
    body = json.dumps([0.123] * 40).encode()
    for accept in (JSON, CSV, NPY):
        with pytest.raises(EngineError, match="request fewer outputs"):
            tensor_model.transform_fn(Double(), body, JSON, accept, 60)


def test_a_models_name_is_the_clients_own() -> None:
    names = [client_name(name) for name in ("봄#0a1b2c-17", "###0a1b2c-1", "a#b")]
    assert names == ["봄", "##", "a#b"]


def test_choosing_a_handler_imports_nothing_large() -> None:
    """Workers of built-in models have 20 MB; numpy alone would double that."""
    code = (
        "import sys, handlers.handler_service as service; service.handler_for('.');"
        "print({'numpy', 'scipy', 'orjson', 'mxnet', 'onnxruntime'} & {*sys.modules})"
    )
    assert python("-c", code).stdout == "set()\n"
