"""Answers of a worker in Multi Model Server's protocol, whatever its script returns or raises."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mms.model_loader import MmsModelLoader

from serving.settings import REPOSITORY
from tests.e2e.scripts import script
from tests.processes import eventually

SOURCE = """
import json
from common.errors import Overloaded
from sagemaker_inference.errors import BaseInferenceToolkitError

class 오류(BaseInferenceToolkitError):
    pass

class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def model_fn(model_dir):
    return "모델"

def transform_fn(model, body, content_type, accept, context):
    scope = {}
    lines = body.decode("utf-8").splitlines()
    exec("def run():\\n " + "\\n ".join(lines), {**globals(), "context": context}, scope)
    return scope["run"]()
"""


@dataclass(frozen=True)
class Reply:
    status: int
    phrase: str
    headers: dict[str, str]
    body: bytes


class Worker:
    """One connection of Multi Model Server to a worker, without the socket."""

    def __init__(self, folder: Path, source: str) -> None:
        within = folder / "within"
        within.mkdir(parents=True)
        model = script(folder / "model", source)
        spec = {"name": "봄", "engine_name": "봄", "path": str(model)}
        (within / "model.json").write_text(json.dumps(spec))
        self.service = MmsModelLoader().load("m1", str(within), "handlers.handler_service", None, 1)

    @property
    def handler(self) -> Any:
        return self.service._entry_point.__self__

    def stop(self) -> None:
        self.handler.pool._free[0].stop()

    def ask(self, body: str, content_type: str = "application/octet-stream", id: str = "") -> Reply:
        given = {"content-type": content_type, "x-request-id": id}
        headers = [{"name": k.encode(), "value": v.encode()} for k, v in given.items()]
        value = bytearray(body.encode())
        parameters = [{"name": "body", "contentType": content_type, "value": value}]
        request = {"requestId": b"1", "headers": headers, "parameters": parameters}
        return _read(self.service.predict([request]))


def _read(message: bytes) -> Reply:
    """Parses an answer as Multi Model Server's Java side does."""
    stream = io.BytesIO(message)

    def number() -> int:
        return int.from_bytes(stream.read(4), "big", signed=True)

    def piece() -> bytes:
        return stream.read(number())

    assert (number(), piece(), piece()) == (200, b"Prediction success", b"1")
    headers = {"content-type": piece().decode("ascii")}
    status, phrase = number(), piece().decode("ascii")
    for _ in range(number()):
        name = piece().decode("ascii")
        headers[name] = piece().decode("ascii")
    body = piece()
    assert (number(), stream.read()) == (-1, b"")
    return Reply(status, phrase, headers, body)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """The environment as `serve` makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        yield


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"), SOURCE)
    assert made.handler.load_error is None
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def same_process(worker: Worker) -> Iterator[None]:
    """No test restarts the script's process."""
    first = json.loads(worker.ask("import os\nreturn os.getpid()").body)
    yield
    assert json.loads(worker.ask("import os\nreturn os.getpid()").body) == first


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return '나 \\ud800'", "나 ?"),
        ("return {'나 \\ud800': '\\udfff'}", '{"나 \\ud800": "\\udfff"}'),
        ("print('\\ud800 나')\nreturn 'x'", "x"),
        ("import sys\nprint('\\ud800', file=sys.stderr)\nreturn 'x'", "x"),
        ("import logging\nlogging.error('\\ud800')\nreturn 'x'", "x"),
        ("context.set_response_header(0, 'Content-Length', '3')\nreturn '봄밤'", "봄밤"),
        ("context.set_response_header(0, 'transfer-encoding', 'x')\nreturn '봄'", "봄"),
    ],
)
def test_unusual_answers_reach_the_client(worker: Worker, code: str, expected: str) -> None:
    reply = worker.ask(code)
    assert (reply.status, reply.body.decode()) == (200, expected)
    assert {"content-length", "transfer-encoding"}.isdisjoint(reply.headers)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise ValueError('나 \\ud800')", 500, "raised ValueError: 나 \\ud800"),
        ("raise ValueError('시' * 1_000_000)", 500, "raised ValueError: 시시"),
        ("raise type('가' * 1_000_000, (Exception,), {})", 500, "the model's script raised 가"),
        ("raise Unsayable", 500, "raised Unsayable"),
        ("raise 오류(422, '너무 깁니다 \\ud800', 'x')", 422, "너무 깁니다 \\ud800"),
        ("raise 오류(422, '긴' * 1_000_000 + '끝', 'x')", 422, "긴...긴"),
        ("raise 오류(10 ** 30, '', 'x')", 500, ""),
        ("raise SystemExit('\\ud800')", 500, "called sys.exit('\\ud800')"),
        ("return b'', '\\ud800'", 500, "must be printable ASCII"),
        ("context.set_response_header(0, 'x-봄', '1')\nreturn 'x'", 500, "'x-봄' is no header na"),
        ("context.set_response_header(0, 'x', '봄')\nreturn 'x'", 500, "header x is '봄'"),
        ("context.set_response_header(0, 'x', 'a\\r\\ny: 1')\nreturn 'x'", 500, "header x is"),
        ("context.set_response_header(0, 'x', 'a' * 9000)\nreturn 'x'", 500, "at most 6000"),
        (
            "import ast\nast.literal_eval('나 보기가')",
            500,
            "raised SyntaxError: invalid syntax",
        ),
        ("raise Overloaded('붐빔', retry_after_s='곧')", 503, "붐빔"),
        ("raise Overloaded('붐빔', retry_after_s=10 ** 400)", 503, "붐빔"),
        ("raise Exception('첫째 줄\\n둘째 줄')", 500, "raised Exception: 첫째 줄 둘째 줄"),
        ("raise KeyboardInterrupt", 500, "raised KeyboardInterrupt"),
        ("def f(): f()\nf()", 500, "RecursionError"),
        ("return None", 500, "returned nothing (None)"),
        ("return object()", 500, "returned a object, must return bytes, text or JSON values"),
        ("return b'a', 'b', 'c'", 500, "returned a tuple of 3"),
        ("return b'a', 7", 500, "the header content-type is 7, must be printable ASCII"),
        ("return b'a', 'text/plain\\nx-y: 1'", 500, "x-y: 1', must be printable ASCII"),
        ("return b'a', 'a' * 1_000_000", 500, "at most 6000 can be sent"),
        ("return b'x' * 120_000_000", 500, "the answer has 120000000 bytes, must be at most"),
        ("context.set_response_status(99, '', 0)\nreturn 'x'", 500, "status is 99"),
    ],
)
def test_unusual_errors_reach_the_client(
    worker: Worker, code: str, status: int, message: str
) -> None:
    reply = worker.ask(code)
    body = json.loads(reply.body)
    assert (reply.status, reply.phrase, body["code"]) == (status, "", status), body
    assert message in body["message"]
    assert len(reply.body) < 10_000
    assert b"Traceback" not in reply.body


def test_the_traceback_of_a_script_follows_the_id_of_its_request(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    assert worker.ask("raise ValueError('겨울')", id="find-me").status == 500
    written = ""

    def lines() -> list[str]:
        nonlocal written
        written += capfd.readouterr().out
        return written.splitlines()

    eventually(lambda: "봄: ValueError: 겨울" in lines())
    begin = lines().index("봄: request find-me failed")
    assert lines()[begin + 1] == "봄: Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("import nothing_like_it", 500, "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def model_fn(:", 500, "is not Python"),
        ("import sys; sys.exit(3)", 500, "called sys.exit(3)"),
        ("import os; os._exit(3)", 500, "ended its process while it was loaded (status 3)"),
        ("import os; os.abort()", 500, "killed by SIGABRT while it was loaded"),
        (
            "def transform_fn(m, b, c, a): return b\ndef input_fn(b, c): return b\n",
            400,
            "Cannot use transform_fn implementation in conjunction with input_fn",
        ),
        ("def model_fn(d): return 0", 400, "Please provide a predict_fn implementation"),
        ("def model_fn(a, b, c): return 0\ndef predict_fn(d, m): 0", 400, "takes 3 arguments"),
        ("def load_model(d): return 0", 400, "load_model without predict"),
        ("raise ValueError('\\ud800')", 500, "raised ValueError"),
        ("raise ValueError('시' * 1_000_000)", 500, "raised ValueError"),
    ],
)
def test_a_failed_load_has_a_reason(tmp_path: Path, source: str, status: int, reason: str) -> None:
    failed = Worker(tmp_path, source)
    outcome = failed.handler._outcome()
    assert outcome["status"] == status
    assert reason in outcome["message"]
    reply = failed.ask("1", "application/json")
    assert (reply.status, json.loads(reply.body)["message"]) == (status, outcome["message"])
    assert len(reply.body) < 10_000
