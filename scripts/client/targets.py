"""Sends calls to a server by its URL, or to a SageMaker endpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import botocore.exceptions
import requests
from botocore.config import Config
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ReadTimeoutError

from command.errors import Problem
from scripts.aws.account import Account
from scripts.client.errors import UNREACHABLE, CallFailed, NotReady
from scripts.client.names import model_path
from scripts.client.options import Target as Options

SUFFIX = ".tar.gz"
CONNECT_S = 5.0
CONNECTIONS = 1000
JSON, EVENTS = "application/json", "text/event-stream"
LINES = ("application/x-ndjson", "application/jsonlines", "application/jsonl")
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Call:
    """A request to a model; `model` is None on an endpoint with a single model."""

    model: str | None
    body: bytes
    stream: bool = False
    lines: bool = False  # the body is JSON lines

    @property
    def content_type(self) -> str:
        return LINES[1] if self.lines else JSON

    @property
    def accept(self) -> str:
        """The Accept header: a stream is preferred to a whole answer, or not accepted."""
        return f"{EVENTS}, {LINES[0]};q=0.9, {JSON};q=0.5" if self.stream else self.content_type


@dataclass(frozen=True)
class Answer:
    """A response; `chunks` yields the body's bytes as they arrive."""

    content_type: str
    chunks: Iterator[bytes]


class Target(Protocol):
    """A server or an endpoint. Calls raise `CallFailed`, or `Problem` for wrong options."""

    def call(self, call: Call) -> contextlib.AbstractContextManager[Answer]: ...
    def describe(self, call: Call) -> str: ...


def open_target(options: Options) -> Target:
    """Return the server or endpoint that the options name. Raises `Problem`."""
    if options.endpoint is not None:
        return SageMaker(options)
    return Local(str(options.url), options.timeout, os.environ.get("INFERENCE_TOKEN"))


def session(url: str, token: str | None = "") -> requests.Session:
    """Return an HTTP session for `url`, which uses no proxy to this machine."""
    session = requests.Session()
    session.trust_env = urlsplit(url).hostname not in THIS_MACHINE
    if token:
        session.headers["Authorization"] = f"Bearer {token}"
    return session


class Local:
    """A server, by its URL."""

    def __init__(self, url: str, timeout_s: float, token: str | None = None) -> None:
        self._url, self._timeouts = url.rstrip("/"), (CONNECT_S, timeout_s)
        self._session = session(self._url, token)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))

    def _request(self, call: Call) -> tuple[str, dict[str, str]]:
        path = "/invocations"
        if call.model is not None:
            path = f"/predictions/{model_path(call.model)}"
        return self._url + path, {"Content-Type": call.content_type, "Accept": call.accept}

    def describe(self, call: Call) -> str:
        url, headers = self._request(call)
        lines = [f"POST {url}", *(f"{name}: {value}" for name, value in headers.items())]
        return "\n".join([*lines, "", call.body.decode("utf-8")])

    @contextlib.contextmanager
    def call(self, call: Call) -> Iterator[Answer]:
        url, headers = self._request(call)
        try:
            with self._session.post(
                url, data=call.body, headers=headers, timeout=self._timeouts, stream=True
            ) as answer:
                if answer.status_code >= 400:
                    message = message_of(answer.content)
                    raise CallFailed(
                        f"{message} (status {answer.status_code})",
                        answer.status_code,
                        kind_of(answer),
                    )
                kind = answer.headers.get("content-type", "")
                yield Answer(kind, answer.iter_content(None))
        except requests.Timeout:
            raise CallFailed(
                f"{self._url} gave no answer within {self._timeouts[1]:g} s", kind="timeout"
            ) from None
        except requests.ConnectionError as error:
            if any(isinstance(cause, ReadTimeoutError) for cause in error.args):
                raise CallFailed(
                    f"{self._url} stopped in its answer for {self._timeouts[1]:g} s", kind="timeout"
                ) from None
            raise CallFailed(
                f"{self._url} cannot be reached: {root_cause(error)}", kind=UNREACHABLE
            ) from None
        except requests.exceptions.ChunkedEncodingError:
            raise CallFailed(f"{self._url} broke off its answer", kind="broken answer") from None
        except requests.RequestException as error:
            raise CallFailed(f"the call failed: {error}", kind="broken answer") from None


class SageMaker:
    """A SageMaker endpoint, by boto3, without retries."""

    def __init__(self, options: Options) -> None:
        self._endpoint = options.endpoint
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=options.timeout,
            retries={"total_max_attempts": 1},
            max_pool_connections=CONNECTIONS,
        )
        self._client = Account(options).session.client("sagemaker-runtime", config=config)

    def _arguments(self, call: Call) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {"EndpointName": self._endpoint, "Body": call.body}
        arguments |= {"ContentType": call.content_type, "Accept": call.accept}
        if call.model is not None:
            arguments["TargetModel"] = call.model.removesuffix(SUFFIX) + SUFFIX
        # The API's streaming call takes no TargetModel.
        stream = call.stream and call.model is None
        return "invoke_endpoint" + "_with_response_stream" * stream, arguments

    def describe(self, call: Call) -> str:
        name, arguments = self._arguments(call)
        shown = {**arguments, "Body": call.body.decode("utf-8")}
        return f"sagemaker-runtime {name}\n{json.dumps(shown, ensure_ascii=False, indent=1)}"

    @contextlib.contextmanager
    def call(self, call: Call) -> Iterator[Answer]:
        name, arguments = self._arguments(call)
        try:
            answer = getattr(self._client, name)(**arguments)
            chunks = _parts(answer["Body"]) if "stream" in name else answer["Body"].iter_chunks()
            yield Answer(answer.get("ContentType", ""), chunks)
        except botocore.exceptions.ClientError as error:
            raise _failed(error) from None
        except (
            botocore.exceptions.NoCredentialsError,
            botocore.exceptions.PartialCredentialsError,
        ) as error:
            raise Problem(f"{error}; set --profile or AWS_ACCESS_KEY_ID and the like") from None
        except botocore.exceptions.ReadTimeoutError:
            raise CallFailed("the endpoint gave no answer in time", kind="timeout") from None
        except botocore.exceptions.ParamValidationError as error:
            raise Problem(str(error).replace("\n", " ")) from None
        except botocore.exceptions.BotoCoreError as error:
            raise CallFailed(str(error), kind=type(error).__name__) from None


def _parts(stream: Any) -> Iterator[bytes]:
    """Yield the payload of an event stream; boto3 raises its errors."""
    for event in stream:
        if "PayloadPart" in event:
            yield event["PayloadPart"]["Bytes"]


def _failed(error: botocore.exceptions.ClientError) -> CallFailed:
    response: Mapping[str, Any] = error.response
    code = str(response.get("Error", {}).get("Code", "error"))
    message = str(response.get("Error", {}).get("Message", error))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "ModelNotReadyException":
        return NotReady(message, status, code)
    if "OriginalMessage" in response:  # the container's answer
        status = int(response.get("OriginalStatusCode") or 0)
        message = f"{message_of(response['OriginalMessage'].encode())} (status {status})"
        return CallFailed(message, status, f"{code} {status}")
    return CallFailed(f"{code}: {message}", status, code)


def message_of(body: bytes) -> str:
    """Return the error message in a response's body: its `message`, or the text itself."""
    text = body.decode("utf-8", "replace").strip()
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            value = value.get("message") or value.get("error") or value.get("Message")
        if isinstance(value, dict):  # OpenAI's {"error": {"message"}}
            value = value.get("message")
        if isinstance(value, str):
            return value
    return text[:500] or "an error without a message"


def kind_of(answer: requests.Response) -> str:
    """Return an error's status and type, under which reports count it."""
    with contextlib.suppress(ValueError, RecursionError):
        body = answer.json()
        if isinstance(body, dict) and isinstance(body.get("type"), str):
            return f"{answer.status_code} {body['type']}"
    return str(answer.status_code)


def root_cause(error: BaseException) -> str:
    """Return the operating system's message from a chain of wrapped errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        reason = getattr(cause, "reason", None) or (cause.args[0] if cause.args else None)
        cause = (
            cause.__cause__
            or cause.__context__
            or (reason if isinstance(reason, BaseException) else None)
        )
    return str(error)
