"""Tensors of a gRPC request become the HTTP route's, and its answers messages."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from serving.api.grpc.convert import MAX_VALUES, from_http, one_text, parameters, to_http
from serving.api.grpc.messages import message
from serving.api.v2.inference import HEADER_LENGTH
from serving.errors import BadRequest, WorkerFailed

ModelInferRequest = message("inference.ModelInferRequest")
KOREAN = "나는 오늘"


def packed(*texts: str) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def request(*inputs: dict[str, Any], raw: tuple[bytes, ...] = (), **more: Any) -> Any:
    return ModelInferRequest(inputs=inputs, raw_input_contents=raw, **more)


def tensor(datatype: str, shape: list[int], field: str = "", values: Any = ()) -> dict[str, Any]:
    described = {"name": "text", "datatype": datatype, "shape": shape}
    return {**described, "contents": {field: values}} if field else described


def test_raw_tensors_stand_behind_the_json_in_their_order() -> None:
    ids = np.arange(6, dtype="<i8").tobytes()
    asked = request(
        tensor("INT64", [2, 3]) | {"name": "ids"},
        tensor("BYTES", [1]),
        raw=(ids, packed(KOREAN)),
        id="요청 1",
        outputs=[{"name": "글"}],
    )
    asked.parameters["temperature"].double_param = 0.5
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    body, headers = to_http(asked)
    length = int(headers[HEADER_LENGTH])
    assert body[length:] == ids + packed(KOREAN)
    told = json.loads(body[:length])
    sizes = [t["parameters"]["binary_data_size"] for t in told["inputs"]]
    assert sizes == [48, len(packed(KOREAN))]
    assert (told["id"], told["outputs"][0]["name"]) == ("요청 1", "글")
    assert told["parameters"] == {"temperature": 0.5, "binary_data_output": True}


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT16", "int_contents", [-3, 4]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -2.0]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [KOREAN.encode(), b"", "🌸".encode()]),
    ],
)
def test_contents_come_and_go_as_values(datatype: str, field: str, values: list[Any]) -> None:
    body, headers = to_http(request(tensor(datatype, [2], field, values)))
    assert headers == {}
    (given,) = json.loads(body)["inputs"]
    assert given["data"] == [v.decode() if datatype == "BYTES" else v for v in values]
    answer = {"model_name": "봄", "model_version": "1", "outputs": [given]}
    found = from_http(json.dumps(answer).encode(), None)
    assert list(getattr(found.outputs[0].contents, field)) == values
    assert not found.raw_output_contents


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request(tensor("FP16", [1])), "raw only"),
        (request(tensor("", [1])), "raw only"),
        (request(tensor("BYTES", [1], "bytes_contents", [b"\xff"])), "UTF-8"),
        (request(tensor("INT64", [1]), raw=(b"", b"")), "2 tensors, inputs 1"),
    ],
)
def test_what_is_wrong_with_tensors_is_said(asked: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        to_http(asked)


def test_binary_outputs_are_raw_ones() -> None:
    pieces = [packed(KOREAN, "봄"), struct.pack("<2q", 16, 3)]
    outputs = [
        {"name": n, "datatype": d, "shape": [2], "parameters": {"binary_data_size": len(piece)}}
        for n, d, piece in zip(("글", "수"), ("BYTES", "INT64"), pieces, strict=True)
    ]
    told: dict[str, Any] = {"model_name": "봄", "model_version": "10", "id": "1"}
    header = json.dumps({**told, "outputs": outputs, "parameters": {"a": 2, "b": [1]}}).encode()
    found = from_http(header + b"".join(pieces), str(len(header)))
    assert (found.model_name, found.model_version, found.id) == ("봄", "10", "1")
    assert list(found.raw_output_contents) == pieces
    assert [(o.name, o.datatype, list(o.shape)) for o in found.outputs] == [
        ("글", "BYTES", [2]),
        ("수", "INT64", [2]),
    ]
    assert parameters(found.parameters) == {"a": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        "한 줄".encode(),
        b'{"model_name": "a", "model_version": "1", "outputs": [{"name": "x"}]}',
        b'{"model_name": "a", "model_version": "1", "outputs": [{"name": "x", "shape": [1],'
        b' "datatype": "FP16", "data": [1]}]}',
        b'{"model_name": "a", "model_version": "1", "outputs": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:20].decode(),
)
def test_an_answer_of_another_kind_is_a_fault_of_the_model(body: bytes) -> None:
    with pytest.raises(WorkerFailed, match="none of the Open Inference Protocol"):
        from_http(body, None)


def test_no_answer_takes_many_times_its_bytes() -> None:
    """A script could end the gateway by them."""

    def answer(outputs: list[dict[str, Any]], data: bytes) -> Any:
        head = json.dumps({"model_name": "봄", "model_version": "1", "outputs": outputs}).encode()
        return from_http(head + data, str(len(head)))

    def sized(size: int) -> dict[str, Any]:
        parameters = {"binary_data_size": size}
        return {"name": "글", "datatype": "BYTES", "shape": [1], "parameters": parameters}

    assert list(answer([sized(2), sized(1)], b"abc").raw_output_contents) == [b"ab", b"c"]
    for sizes in ([3, -3, 3], [4], [2, 2]):
        with pytest.raises(WorkerFailed, match="none of the Open Inference Protocol"):
            answer([sized(size) for size in sizes], b"abc")
    with pytest.raises(WorkerFailed, match="more than 1000000 values, as binary data"):
        from_http(b'{"outputs": [%s]}' % b",".join([b"[]"] * MAX_VALUES), None)


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_the_one_text_may_be_raw_or_not(shape: list[int]) -> None:
    assert one_text(request(tensor("BYTES", shape), raw=(packed(KOREAN),))) == KOREAN
    typed = tensor("BYTES", shape, "bytes_contents", [KOREAN.encode()])
    assert one_text(request(typed)) == KOREAN


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        request(tensor("BYTES", [1])),
        request(tensor("BYTES", [2]), raw=(packed("가", "나"),)),
        request(tensor("BYTES", [1]), raw=(packed("가", "나"),)),
        request(tensor("BYTES", [1]), raw=(b"\0",)),
        request(tensor("BYTES", [1]), raw=(struct.pack("<I", 1) + b"\xff",)),
        request(tensor("INT64", [1]), raw=(bytes(8),)),
        request(tensor("BYTES", [1]) | {"name": "글"}, raw=(packed("가"),)),
    ],
)
def test_anything_else_is_not_one_text(asked: Any) -> None:
    with pytest.raises(BadRequest, match="text"):
        one_text(asked)
