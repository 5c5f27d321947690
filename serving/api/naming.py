"""Resolves the name in a request to a model: checks the token's right to it, resolves aliases.

`name_model` comes first: `authorize` calls it for a name in the path, routes for a name in a header
or body. Then routes that call a model use `choose_model`, routes that describe a model
`described_models`, and routes that load or unload a model `check_no_alias`.
"""

from __future__ import annotations

from serving.aliases import FILE
from serving.api.gateway import Gateway
from serving.api.request import Request
from serving.api.request_body import header_text
from serving.errors import Conflict, Forbidden
from serving.names import normal_name

SESSION_ID = "x-session-id"
CHOSEN = "kogpt2.model"  # key in an ASGI scope: the alias's model, if gRPC has chosen it already


def name_model(gateway: Gateway, request: Request, name: str) -> None:
    """Set a request's model or alias for its log line, and check the token's right to it.

    Call it before the store is read or a model loaded. Raises `Forbidden` if the request's token
    may not use the name, or any model that it stands for: neither an alias nor a base gives
    access to models, and a refusal does not depend on which of them is chosen. The base of a
    model that is not loaded is checked by `Bases.find` and `Gateway.use`.
    """
    request.state.model = name
    token = request.state.token
    if token is not None:
        models = _models(gateway, name)
        for model in models:
            token.check_model(model)
        for base in _bases(gateway, models):
            token.check_base(base)


def _models(gateway: Gateway, name: str) -> tuple[str, ...]:
    """Return a name, and the models of the alias that it may be."""
    alias = gateway.aliases.find(name)
    return (name,) if alias is None else (name, *alias.models)


def _bases(gateway: Gateway, models: tuple[str, ...]) -> list[str]:
    """Return the bases that those of the models which are loaded need."""
    known = map(gateway.registry.find, models)
    needed = (m.stored_base for m in known if m is not None and m.needs_base)
    return [base.name for base in needed if base is not None]


def choose_model(gateway: Gateway, request: Request, name: str, user: str = "") -> str:
    """Return the model that answers a request for `name`. Call it once per request.

    Requests with the same X-Session-Id, else the same `user` of OpenAI's body, get the same model
    of an alias.
    """
    alias = gateway.aliases.find(name)
    if alias is None:
        return name
    model: str = request.scope.get(CHOSEN, "")
    if model not in alias.weights:
        model = alias.choose(header_text(request.headers.get(SESSION_ID, "")) or user)
    alias.requests[model] = alias.requests.get(model, 0) + 1
    request.state.model, request.state.alias = model, name
    return model


def described_models(gateway: Gateway, name: str) -> tuple[str, ...]:
    """Return the models that a name or alias stands for, the largest weight first."""
    alias = gateway.aliases.find(name)
    return (name,) if alias is None else alias.models


def check_no_alias(gateway: Gateway, name: str) -> None:
    """Raise `Conflict` for an alias, which cannot be loaded or unloaded.

    An alias with the name of one of its own models, or of a loaded model, stands for that model.
    """
    alias = gateway.aliases.find(name)
    if alias is None or name in alias.weights or gateway.registry.find(name) is not None:
        return
    raise Conflict(f"{name} is an alias in {FILE}: name the model, {' or '.join(alias.models)}")


def listed_aliases(gateway: Gateway, request: Request) -> dict[str, dict[str, float]]:
    """Return the aliases that the request's token may use, each with its models' weights."""
    aliases = sorted(gateway.aliases.all(), key=lambda alias: alias.name)
    return {
        alias.name: dict(alias.weights)
        for alias in aliases
        if may_call(gateway, request, alias.name)
    }


def name_source(gateway: Gateway, request: Request, url: str) -> None:
    """Check the source that a model is loaded from: its `url`, or its base.

    With a token of TOKENS_FILE it must be a name in the store, as the token's patterns are for such
    names. Raises `Forbidden`, and `Conflict` for an alias.
    """
    if request.state.token is not None:
        if "://" in url or url.startswith("/"):
            request.state.token.usage.refused["model"] += 1
            raise Forbidden("this token loads models by their names in the store only")
        request.state.token.check_model(normal_name(url))
    check_no_alias(gateway, normal_name(url))


def may_call(gateway: Gateway, request: Request, name: str) -> bool:
    """Return whether a request's token may use all that a name stands for; lists then show it."""
    token = request.state.token
    if token is None:
        return True
    models = _models(gateway, name)
    return all(map(token.may_call, (*models, *_bases(gateway, models))))
