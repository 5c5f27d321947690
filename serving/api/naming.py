"""From the name in a request to a model: what its token may use, what an alias stands for.

`name_model` comes first: `authorize` calls it for the name in a path, routes for one in a header or
body. Then those that have a model answer call `choose_model`, those that describe a model
`described_models`, and those that load and unload `check_no_alias`.
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
CHOSEN = "kogpt2.model"  # in a scope: the model of the alias, where gRPC has chosen it


def name_model(gateway: Gateway, request: Request, name: str) -> None:
    """Sets the model or alias of a request, for its log line, and checks the token's right.

    To be called before the store is read or a model loaded.

    Raises `Forbidden` if the request's token may not use the name, or one of the models that it
    stands for: an alias opens no model, and a refusal does not depend on the choice.
    """
    request.state.model = name
    token, alias = request.state.token, gateway.aliases.find(name)
    if token is not None:
        token.check_model(name)
        for model in alias.models if alias else ():
            token.check_model(model)


def choose_model(gateway: Gateway, request: Request, name: str, user: str = "") -> str:
    """The model that answers a request for `name`, once a request.

    Requests with the same SageMaker session, else the same X-Session-Id, else the same `user` of
    OpenAI's body, get the same model of an alias. A session of SageMaker's that is open stays with
    its model also when the weights change.
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
    """The models that a name stands for, the one with the largest weight first."""
    alias = gateway.aliases.find(name)
    return (name,) if alias is None else alias.models


def check_no_alias(gateway: Gateway, name: str) -> None:
    """Raises `Conflict` for an alias.

    An alias that has the name of one of its own models, or of a loaded one, means that model where
    models are loaded and unloaded.
    """
    alias = gateway.aliases.find(name)
    if alias is None or name in alias.weights or gateway.registry.find(name) is not None:
        return
    raise Conflict(f"{name} is an alias in {FILE}: name the model, {' or '.join(alias.models)}")


def listed_aliases(gateway: Gateway, request: Request) -> dict[str, dict[str, float]]:
    """Of each alias that the request's token may use the models and their weights."""
    aliases = sorted(gateway.aliases.all(), key=lambda alias: alias.name)
    return {
        alias.name: dict(alias.weights)
        for alias in aliases
        if all(may_call(request, name) for name in (alias.name, *alias.models))
    }


def name_source(gateway: Gateway, request: Request, url: str) -> None:
    """Checks what a model is loaded from: its `url`, or its base.

    With a token it must be a name in the store: the patterns of TOKENS_FILE are of these. Raises
    `Forbidden`, and `Conflict` for an alias.
    """
    if request.state.token is not None:
        if "://" in url or url.startswith("/"):
            request.state.token.usage.refused["model"] += 1
            raise Forbidden("this token loads models by their names in the store only")
        request.state.token.check_model(normal_name(url))
    check_no_alias(gateway, normal_name(url))


def may_call(request: Request, name: str) -> bool:
    """Whether lists show the model."""
    return request.state.token is None or request.state.token.may_call(name)
