"""Authorization: checks a request's token for its route and for the model in its path."""

from __future__ import annotations

import enum
import secrets

from serving.api.gateway import Gateway
from serving.api.naming import check_no_alias, name_model
from serving.api.request import Request
from serving.errors import Unauthorized
from serving.tokens import current


class Right(enum.Enum):
    """A right that a token grants."""

    CALL = enum.auto()
    LIST = enum.auto()
    LOAD = enum.auto()  # and unload


def check_token(gateway: Gateway, request: Request, right: Right) -> None:
    """Check a request's bearer token for `right`. Call it once per request, before all else.

    Raises `Unauthorized` without a valid token, if the settings require one for `right`. A token of
    TOKENS_FILE counts the request as in flight until `App` has sent the answer; raises
    `TooManyRequests` beyond the token's limits, and `Forbidden` if it may not load models.
    `serving.api.naming` checks which models such a token may use.
    """
    settings = gateway.settings
    # Where only INFERENCE_TOKEN is set, its token is the one for loading, too.
    calls = (settings.inference_token, "INFERENCE_TOKEN")
    loads = (settings.management_token, "MANAGEMENT_TOKEN")
    loads = calls if loads[0] == calls[0] else loads
    accepted = {Right.CALL: (calls,), Right.LIST: (loads, calls), Right.LOAD: (loads,)}[right]
    known = {token: variable for token, variable in accepted if token}
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
    variables = [*known.values(), *["TOKENS_FILE"] * gateway.tokens.exist]
    raise Unauthorized(f"send a token of {' or '.join(variables)} as Authorization: Bearer <token>")


def authorize(gateway: Gateway, request: Request, right: Right) -> None:
    """Check a request's token, and the token's right to the model in the path.

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
