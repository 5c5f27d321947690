"""The sagemaker-runtime HTTP API on loopback, for an unmodified boto3 client.

POST /endpoints/{name}/invocations                  with X-Amzn-SageMaker-Target-Model, or of a
                                                    single model
POST /endpoints/{name}/invocations-response-stream  of a single model
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from botocore.config import Config

from serving.api.event_stream import EVENT_STREAM, payload_part
from testbed.s3 import ACCESS, client
from tests.platform.agent import TARGET
from tests.platform.endpoint import Endpoint, SingleModel
from tests.platform.limits import PlatformError, validation_error
from tests.serving.store.file_host import running

MAX_BODY_BYTES = 6 << 20
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


# Without retries. AWS advises a timeout of 70 s, above the platform's 60 s.
CLIENT = Config(retries={"total_max_attempts": 1}, max_pool_connections=16, read_timeout=70)


class Runtime:
    """`url` is the API's, `environment` for clients of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.environment = {**ACCESS, "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url}


@contextlib.contextmanager
def runtime(*endpoints: Endpoint) -> Iterator[Runtime]:
    """The API of an account with these endpoints."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
    with running(server):
        yield Runtime(f"http://127.0.0.1:{server.server_port}")


@contextlib.contextmanager
def client_of(endpoint: Endpoint) -> Iterator[Any]:
    """boto3's client of an account with one endpoint."""
    with (
        runtime(endpoint) as api,
        contextlib.closing(client(api.url, "sagemaker-runtime", config=CLIENT)) as made,
    ):
        yield made


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    endpoints: dict[str, Endpoint]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        self._id = str(uuid.uuid4())
        try:
            self._answer()
        except PlatformError as error:
            headers = {"x-amzn-errortype": error.kind, "content-type": "application/json"}
            self._send(error.status, headers, json.dumps(error.fields).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        parts = self.path.split("/")
        if len(parts) != 4 or parts[1] != "endpoints":
            raise PlatformError(404, "UnknownOperationException", self.path)
        if size > MAX_BODY_BYTES:
            raise validation_error(f"the body has more than {MAX_BODY_BYTES} bytes")
        endpoint = self.server.endpoints.get(unquote(parts[2]))
        if endpoint is None:
            raise validation_error(f"Endpoint {unquote(parts[2])} of account test not found.")
        if parts[3] == "invocations-response-stream":
            self._stream(endpoint, body)
            return
        target = self.headers.get(TARGET, "").encode("latin-1").decode("utf-8")
        if not target and not isinstance(endpoint.instances[0], SingleModel):
            raise validation_error("TargetModel is needed: this is a multi-model endpoint")
        answer = endpoint.invoke(target, body, self._passed("Accept"))
        self._send(answer.status_code, _returned(answer.headers), answer.content)

    def _passed(self, accept: str) -> dict[str, str]:
        """The headers for the container; `accept` is the client's header for Accept."""
        names = {"Content-Type": "Content-Type", ATTRIBUTES: ATTRIBUTES, accept: "Accept"}
        found = {ours: self.headers.get(theirs) for theirs, ours in names.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("x-amzn-requestid", self._id)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, endpoint: Endpoint, body: bytes) -> None:
        single = endpoint.instances[0]
        if not isinstance(single, SingleModel):
            raise validation_error("multi-model endpoints have no response stream")
        with single.stream(body, self._passed("x-amzn-sagemaker-accept")) as answer:
            self.send_response(200)
            self.send_header("content-type", EVENT_STREAM)
            kind = answer.headers.get("content-type", "application/octet-stream")
            self.send_header("x-amzn-sagemaker-content-type", kind)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in answer.iter_content(None):
                frame = payload_part(piece)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
            self.wfile.write(b"0\r\n\r\n")


def _returned(headers: Mapping[str, str]) -> dict[str, str]:
    """The container's headers that the platform returns to the client."""
    found = {"x-amzn-invoked-production-variant": "AllTraffic"}
    for name in ("content-type", ATTRIBUTES):
        if name in headers:
            found[name] = headers[name]
    return found
