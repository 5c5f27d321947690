"""An asynchronous client of Multi Model Server (MMS), for its unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlencode

from common.unix_http import UnixHTTP
from common.worker_protocol import PROBE_HEADER, WORKER_HEADER
from serving.errors import InsufficientStorage, MMSEnded, Timeout, Unavailable, WorkerFailed

logger = logging.getLogger(__name__)

PAGE = 100  # models in a page of a list
BACK_S = 2.0  # sent as Retry-After; a restarted MMS answers after 1.6 (docs/operate/reliability.md)
UNQUOTED = "?/:@!$'()*,"  # not escaped in a query, because MMS limits its length

Query = Mapping[str, str] | Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """An HTTP response of MMS. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def by_worker(self) -> bool:
        """True if a worker produced the response, false if MMS itself did."""
        return WORKER_HEADER in self.headers

    def json(self) -> dict[str, Any]:
        """Return the JSON object in the body; an empty one if the body is anything else."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


class MMSClient:
    """Calls MMS. A `name` is the id of a model (`Model.id`), which is ASCII and never reused."""

    def __init__(self, socket_path: str, probe_secret: str) -> None:
        self._http = UnixHTTP(socket_path)
        self._probe_secret = probe_secret

    def close(self) -> None:
        self._http.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        query: Query | None = None,
    ) -> Answer:
        """Send a request. `headers` must contain the type of `body`.

        Raises `Unavailable` if MMS does not run, `MMSEnded` if it ends during the call, `Timeout`.
        """
        if query:
            url += "?" + urlencode(query, safe=UNQUOTED, quote_via=quote_plus)
        try:
            sent = {"accept": "*/*", **(headers or {})}
            return Answer(*await self._http.request(method, url, timeout_s, sent, body))
        except asyncio.TimeoutError:
            raise Timeout(f"no answer within {timeout_s:.0f} s") from None
        except OSError as error:
            logger.debug("Multi Model Server did not answer: %r", error)
            absent = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            kind = Unavailable if absent else MMSEnded
            raise kind("Multi Model Server is being started", retry_after_s=BACK_S) from None

    async def register(
        self, name: str, folder: Path, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        """Register a model and wait until its worker has started in `folder`.

        Raises `WorkerFailed`, `InsufficientStorage`, and what `call` raises.
        """
        body = {"model_name": name, "url": str(folder), "synchronous": True, **options}
        answer = await self.call(
            "POST",
            "/models",
            timeout_s=timeout_s,
            headers={"Content-Type": "application/json"},
            body=json.dumps(body).encode(),
        )
        if answer.status == 507:
            raise InsufficientStorage("the model's worker has no memory left")
        if answer.status != 200:
            raise WorkerFailed(f"the model's worker did not start ({message_of(answer)})")

    async def scale(self, name: str, low: int, high: int, timeout_s: float = 30.0) -> None:
        """Set the number of MMS's connections to a worker. Raises `Unavailable`, `Timeout`.

        A smaller number may close connections that have a request.
        """
        query = {"min_worker": str(low), "max_worker": str(high), "synchronous": "true"}
        answer = await self.call("PUT", f"/models/{name}", timeout_s=timeout_s, query=query)
        if answer.status >= 400:
            raise Unavailable("Multi Model Server could not scale the workers")

    async def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Return the result of a worker's load of its model.

        It is `{"status": 200, "in_engine": bool, ...}`, or an error's `{"status", "type",
        "message"}`. Raises `WorkerFailed` if the worker returns neither.
        """
        answer = await self.invoke(name, b"", {PROBE_HEADER: self._probe_secret}, timeout_s)
        outcome = answer.json()
        if "status" not in outcome:
            raise WorkerFailed(f"the model's worker did not load it ({message_of(answer)})")
        return outcome

    async def invoke(
        self,
        name: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        query: Query | None = None,
    ) -> Answer:
        """Call a model. A service gets `?data=` of `query` as `row["data"]`, beside the body."""
        return await self.call(
            "POST",
            f"/models/{name}/invoke",
            timeout_s=timeout_s,
            headers=headers,
            body=body,
            query=query,
        )

    async def unregister(self, name: str) -> None:
        """End the model's worker, if there is one."""
        await self.call("DELETE", f"/models/{name}", timeout_s=30)

    async def describe(self, name: str) -> dict[str, Any]:
        """Return MMS's description of a model; `{}` if MMS does not have the model."""
        answer = await self.call("GET", f"/models/{name}", timeout_s=10)
        return answer.json() if answer.status == 200 else {}

    async def socket_number(self, name: str) -> str:
        """Return the N of a worker's socket file `.mms.sock.N`. Raises `WorkerFailed`."""
        try:
            threads = (await self.describe(name))["workers"]
            return str(threads[0]["id"]).partition("-")[0]  # "9000-0a0a1da0"
        except (LookupError, TypeError, ValueError):
            raise WorkerFailed("the model's worker has ended") from None

    async def names(self) -> set[str]:
        """Return the names of all models. Raises `Unavailable`, also for an invalid response."""
        names: set[str] = set()
        query = {"limit": str(PAGE)}
        for _ in range(1000):
            answer = await self.call("GET", "/models", timeout_s=10, query=query)
            page = answer.json()
            try:
                names |= {str(model["modelName"]) for model in page["models"]}
            except (LookupError, TypeError):
                raise Unavailable(
                    f"Multi Model Server listed its models with {message_of(answer)}"
                ) from None
            if page.get("nextPageToken") is None or not page["models"]:
                return names
            query["next_page_token"] = str(page["nextPageToken"])
        return names


def message_of(answer: Answer) -> str:
    """Return the message of an error response, or its status if it has none."""
    return str(answer.json().get("message", f"status {answer.status}"))
