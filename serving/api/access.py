"""Tokens: whether a request may use its route, and the model that its path names."""

from __future__ import annotations

import enum
import secrets

from starlette.requests import Request

from serving.api.gateway import Gateway
from serving.api.naming import check_no_alias, name_model
from serving.errors import Unauthorized
from serving.tokens import current


class Right(enum.Enum):
    """What a token is for."""

    CALL = enum.auto()
    LIST = enum.auto()
    LOAD = enum.auto()  # and unload


def check_token(gateway: Gateway, request: Request, right: Right) -> None:
    """To be called once a request, before anything else.

    Raises `Unauthorized` unless it carries `Authorization: Bearer <token>` with a token for this,
    if any is set. For one of TOKENS_FILE it counts as in flight until `App` has sent its answer;
    raises `TooManyRequests` beyond the token's limits, `Forbidden` if it may not load. Which models
    such a token may use is for `serving.api.naming` to say.
    """
    settings = gateway.settings
    known = {
        Right.CALL: (settings.inference_token,),
        Right.LIST: (settings.management_token, settings.inference_token),
        Right.LOAD: (settings.management_token,),
    }[right]
    known = tuple(filter(None, known))
    if not known and not gateway.tokens.exist:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")
    current.set(None)
    if scheme.lower() == "bearer":
        if any(secrets.compare_digest(sent, token.encode()) for token in known):
            return
        token = gateway.tokens.find(sent)
        if token is not None:
            request.state.token_name = token.name
            token.begin(gateway.tokens.now())
            request.state.token = token
            current.set(token)
            if right is Right.LOAD:
                token.check_load()
            return
    raise Unauthorized("send the token as Authorization: Bearer <token>")


def authorize(gateway: Gateway, request: Request, right: Right) -> None:
    """Checks a request's token, and what its path names.

    Raises what `check_token`, `name_model` and, where models are loaded and unloaded,
    `check_no_alias` and `Gateway.check_ready` do.
    """
    check_token(gateway, request, right)
    name = request.path_params.get("name")
    if name is not None:
        name_model(gateway, request, name)
    if right is Right.LOAD:
        if name is not None:
            check_no_alias(gateway, name)
        gateway.check_ready()
