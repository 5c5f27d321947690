"""Routes: their endpoints, the tokens' rights they need, and their entries in OpenAPI."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import compile_path

from serving.api.access import Right
from serving.api.gateway import Gateway
from serving.api.request import Request
from serving.errors import MethodNotAllowed, ResourceNotFound
from serving.names import normal_name

EVENTS = "text/event-stream"
# Statuses of errors: of routes that call a model, that load one, and that look one up.
CALL = "400 401 403 404 405 406 408 413 415 429 500 503 504 507"
LOADING = "400 401 403 404 408 409 413 415 429 500 503 504 507"
FIND = "401 403 404 429 503"
ANY = "*"  # methods of a route that gets all methods that no other route of the path has
Endpoint = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Kind:
    """The properties that several routes of a contract share.

    tag: the routes' group in OpenAPI; "" omits them
    right: the right that a token must have; None if no token is needed
    error: the schemas of errors; sent, answered: the schemas of bodies, by media type
    """

    tag: str
    right: Right | None = None
    error: str | tuple[str, ...] = "Error"
    sent: Mapping[str, Any] = field(default_factory=dict)
    answered: Mapping[str, Any] = field(default_factory=dict)


UNDESCRIBED = Kind("")
LIST, LOAD = Kind("management", Right.LIST), Kind("management", Right.LOAD)


class ModelName(Convertor[str]):
    """`{name:model}` in a path: a model's name, which may have slashes, in its normal form."""

    regex = ".*"

    def convert(self, value: str) -> str:
        return normal_name(value)

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model", ModelName())


@dataclass(frozen=True)
class Route:
    """A path and its endpoint, whose docstring's first line is the summary in OpenAPI.

    methods: HTTP methods, separated by spaces
    errors: statuses of errors, separated by spaces
    query: parameters as `name=type&name=type`
    """

    methods: str
    path: str
    endpoint: Endpoint
    kind: Kind = UNDESCRIBED
    errors: str = ""
    query: str = ""

    @functools.cached_property
    def compiled(self) -> Any:
        """The path's pattern, the path without types, and the converters of its parameters."""
        return compile_path(self.path)

    @functools.cached_property
    def allowed(self) -> frozenset[str]:
        methods = self.methods.split()
        return frozenset((*methods, "HEAD") if "GET" in methods else methods)

    @property
    def summary(self) -> str:
        return (self.endpoint.__doc__ or "").partition("\n")[0].removesuffix(".")


def find_route(routes: Iterable[Route], request: Request) -> Route:
    """Return a request's route, and set its path and the path's parameters in the scope.

    Raises `ResourceNotFound`, `MethodNotAllowed`. Below /v2 the first route of a path decides:
    `sowol/infer` could be a model's name, too.
    """
    path, method = request.scope["path"], request.method
    same: list[Route] = []
    for route in routes:
        pattern, path_format, convertors = route.compiled
        match = pattern.match(path)
        if match is None:
            continue
        if method in route.allowed or (route.methods == ANY and not same):
            given = match.groupdict().items()
            parameters = {name: convertors[name].convert(value) for name, value in given}
            request.scope["route"], request.scope["path_params"] = path_format, parameters
            return route
        same.append(route)
        if path.startswith("/v2/"):
            break
    if not same:
        raise ResourceNotFound("Requested resource is not found.")
    methods = set().union(*(r.allowed for r in routes if r.path == same[0].path))
    raise MethodNotAllowed(f"{path} takes {', '.join(sorted(methods))}", methods)
