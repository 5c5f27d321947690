"""The `timeout` of a request of the Open Inference Protocol, which the gateway looks for."""

from __future__ import annotations

import json
import math

import pytest

from serving.api.v2.inference import _limit_s
from tests.bounded import bounded

INPUTS = [{"name": "글", "datatype": "BYTES", "shape": [1], "data": ['"timeout": 1}, {진달래']}]


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [
        ({"timeout": 2_000_000}, 2.0),
        ({"말투": "낮게", "timeout": 500_000, "priority": 1}, 0.5),
        ({"timeout": 0}, math.inf),
        ({"timeout": "2000000"}, math.inf),
        ({"timeout": 1.5}, math.inf),
        ({"말투": '"timeout": 1000000,'}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_timeout_of_a_body_is_that_of_its_parameters(
    parameters: dict[str, object], seconds: float
) -> None:
    for body in (
        {"parameters": parameters, "inputs": INPUTS},
        {"inputs": INPUTS, "parameters": parameters, "timeout": 1_000_000},
    ):
        for indent in (None, 2):
            assert _limit_s(json.dumps(body, ensure_ascii=False, indent=indent).encode()) == seconds


@pytest.mark.parametrize("piece", [b"[],", b'"parameters":{', b'"timeout":', b'"timeout":1,', b" "])
def test_tensors_of_megabytes_are_not_parsed(piece: bytes) -> None:
    """Their values would take fifty times the memory of a body, and a second."""
    body = b'{"inputs":[' + piece * (6_500_000 // len(piece))
    with bounded(0, 1 << 20):
        assert _limit_s(body) == math.inf
