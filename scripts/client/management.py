"""Calls to a server's management port."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from command.errors import Failed
from command.options import option, server_url

TIMEOUT_S = 600.0  # above the server's LOAD_TIMEOUT_S, after which it answers 504


@dataclass(kw_only=True)
class Management:
    url: str = option(
        "http://localhost:8081",
        "the server's management port; its token: MANAGEMENT_TOKEN",
        parser=server_url,
        metavar="URL",
    )


def call(
    options: Management, method: str, path: str, query: Mapping[str, str] | None = None
) -> Any:
    """Return the answer's JSON. Raises `Failed` with the server's error message."""
    import requests

    from scripts.client.targets import message_of, root_cause, session

    token = os.environ.get("MANAGEMENT_TOKEN") or os.environ.get("INFERENCE_TOKEN")
    url = options.url
    try:
        with session(url, token) as calls:
            answer = calls.request(method, url + path, params=query, timeout=TIMEOUT_S)
    except requests.Timeout:
        raise Failed(f"{url} gave no answer within {TIMEOUT_S:g} s") from None
    except requests.RequestException as error:
        raise Failed(f"{url} cannot be reached: {root_cause(error)}") from None
    if not answer.ok:
        raise Failed(f"{message_of(answer.content)} (status {answer.status_code})")
    try:
        return answer.json()
    except requests.JSONDecodeError:
        raise Failed(
            f"{url} is not this server's management port: it answers without JSON"
        ) from None
