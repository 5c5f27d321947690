"""The gateway's client of Multi Model Server, on its unix socket."""

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
from serving.errors import MMSEnded, NoRoom, Timeout, Unavailable, WorkerFailed

logger = logging.getLogger(__name__)

PAGE = 100
BACK_S = 2.0  # Java answers again after 1.6 (docs/operate/reliability.md)
UNQUOTED = "?/:@!$'()*,"  # in a query, which MMS takes up to a length

Query = Mapping[str, str] | Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """`headers` have their names in lower case; the body is as its model wrote it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def by_worker(self) -> bool:
        """Whether a worker answered, not MMS in its place."""
        return WORKER_HEADER in self.headers


class MMSClient:
    """Names are MMS's own, which the gateway makes: ASCII and never used again."""

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
        """Raises `Unavailable` when MMS is not there, `MMSEnded` when it ends meanwhile, `Timeout`
        when it is silent.

        A body has the type that `headers` say, or none.
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
        """Starts a worker in `folder`. Raises `WorkerFailed` or `NoRoom`."""
        body = {"model_name": name, "url": str(folder), "synchronous": True, **options}
        answer = await self.call(
            "POST",
            "/models",
            timeout_s=timeout_s,
            headers={"Content-Type": "application/json"},
            body=json.dumps(body).encode(),
        )
        if answer.status == 507:
            raise NoRoom("the model's worker has no memory left")
        if answer.status != 200:
            raise WorkerFailed(f"the model's worker did not start ({message_of(answer)})")

    async def scale(self, name: str, low: int, high: int, timeout_s: float = 30.0) -> None:
        """Sets how many connections MMS has to a model's worker. Raises `Unavailable`, `Timeout`.

        One fewer may be one that has a request.
        """
        query = {"min_worker": str(low), "max_worker": str(high), "synchronous": "true"}
        answer = await self.call("PUT", f"/models/{name}", timeout_s=timeout_s, query=query)
        if answer.status >= 400:
            raise Unavailable("Multi Model Server could not scale the workers")

    async def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        """How the worker's load went: `{"status": 200, "in_engine": bool}` for well, or else
        `{"status", "type", "message"}`."""
        answer = await self.invoke(name, b"", {PROBE_HEADER: self._probe_secret}, timeout_s)
        try:
            outcome = json.loads(answer.body)
        except ValueError:
            outcome = None
        if not isinstance(outcome, dict) or "status" not in outcome:
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
        """`query` becomes values beside the body: `row["data"]` of a service is `?data=`."""
        return await self.call(
            "POST",
            f"/models/{name}/invoke",
            timeout_s=timeout_s,
            headers=headers,
            body=body,
            query=query,
        )

    async def unregister(self, name: str) -> None:
        """Ends the model's worker. A model that MMS does not know is fine."""
        await self.call("DELETE", f"/models/{name}", timeout_s=30)

    async def describe(self, name: str) -> dict[str, Any]:
        """MMS's own description; `{}` of a model that MMS does not know."""
        answer = await self.call("GET", f"/models/{name}", timeout_s=10)
        try:
            found = json.loads(answer.body) if answer.status == 200 else {}
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    async def socket_number(self, name: str) -> str:
        """N of the socket `.mms.sock.N` of a model's worker. Raises `WorkerFailed`."""
        try:
            threads = (await self.describe(name))["workers"]
            return str(threads[0]["id"]).partition("-")[0]  # "9000-0a0a1da0"
        except (LookupError, TypeError, ValueError):
            raise WorkerFailed("the model's worker is gone") from None

    async def names(self) -> set[str]:
        """Of all models that MMS has. Raises `Unavailable` for an answer that is none, too."""
        found: set[str] = set()
        query = {"limit": str(PAGE)}
        for _ in range(1000):
            answer = await self.call("GET", "/models", timeout_s=10, query=query)
            try:
                page = json.loads(answer.body)
                found |= {str(model["modelName"]) for model in page["models"]}
                token = page.get("nextPageToken")
            except (ValueError, LookupError, TypeError, AttributeError):
                raise Unavailable(
                    f"Multi Model Server listed its models with {message_of(answer)}"
                ) from None
            if token is None or not page["models"]:
                return found
            query["next_page_token"] = str(token)
        return found


def message_of(answer: Answer) -> str:
    """MMS's own message, in one line."""
    try:
        return str(json.loads(answer.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}"
