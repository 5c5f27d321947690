"""Resolves the name in a request to a model: checks the token's right to it, resolves aliases.

`name_model` comes first: `authorize` calls it for a name in the path, routes for a name in a header
or body. Then routes that call a model use `choose_model`, routes that describe a model
`described_models`, and routes that load or unload a model `check_no_alias`.
"""

from __future__ import annotations

from starlette.requests import Request

from serving.aliases import FILE
from serving.api.gateway import Gateway
from serving.api.reading import header_text
from serving.api.sessions import SESSION_ID as SAGEMAKER_SESSION
from serving.errors import Conflict, Forbidden
from serving.names import normal_name

SESSION_ID = "x-session-id"
CHOSEN = "kogpt2.model"  # key in an ASGI scope: the alias's model, if gRPC has chosen it already


def name_model(gateway: Gateway, request: Request, name: str) -> None:
    """Set a request's model or alias for its log line, and check the token's right to it.

    Call it before the store is read or a model loaded. Raises `Forbidden` if the request's token
    may not use the name, or any model that it stands for: an alias gives no access to models, and
    a refusal does not depend on which of them is chosen.
    """
    request.state.model = name
    token, alias = request.state.token, gateway.aliases.find(name)
    if token is not None:
        token.check_model(name)
        for model in alias.models if alias else ():
            token.check_model(model)


def choose_model(gateway: Gateway, request: Request, name: str, user: str = "") -> str:
    """Return the model that answers a request for `name`. Call it once per request.

    Requests with the same SageMaker session, else the same X-Session-Id, else the same `user` of
    OpenAI's body, get the same model of an alias. An open SageMaker session stays with its model
    when the weights change, as long as the alias has it.
    """
    alias = gateway.aliases.find(name)
    if alias is None:
        return name
    headers = request.headers
    session = headers.get(SAGEMAKER_SESSION, "")
    sessions = gateway.sessions
    model = sessions.model(session, name) if sessions is not None else ""
    if model not in alias.weights:
        model = request.scope.get(CHOSEN, "")
    if model not in alias.weights:
        model = alias.choose(session or header_text(headers.get(SESSION_ID, "")) or user)
        if sessions is not None:
            sessions.keep(session, name, model)
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
        if all(may_call(request, name) for name in (alias.name, *alias.models))
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


def may_call(request: Request, name: str) -> bool:
    """Return whether a request's token may call a model, which lists then show."""
    return request.state.token is None or request.state.token.may_call(name)
