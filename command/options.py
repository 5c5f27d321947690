"""Options of a command as a dataclass, given to Typer as a function's parameters.

    @dataclass(kw_only=True)
    class Logs(Aws):
        name: str = argument("the deployment")
        follow: bool = option(False, "print new lines until Ctrl-C")

    def logs(options: Logs) -> None: ...

Commands share options by inheritance and pass them on typed.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlsplit

import typer
from rich.markup import escape


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return a dataclass field for `--its-name`; a default of `...` makes it required."""
    return _field(default, typer.Option(..., *names, help=escape(help), **more))


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """Return a dataclass field for a positional argument."""
    return _field(default, typer.Argument(help=escape(help), **more))


def _field(default: Any, info: Any) -> Any:
    if default is ...:
        return dataclasses.field(metadata={"typer": info})
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"typer": info})
    return dataclasses.field(default=default, metadata={"typer": info})


def as_function(command: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """Return the command as a function with a parameter for each field of its options."""
    (options,) = (t for n, t in get_type_hints(command).items() if n != "return")
    hints = get_type_hints(options)
    parameters = []
    for field in fields(options):
        info, hint, default = copy(field.metadata["typer"]), hints[field.name], field.default
        if hint is bool and not info.param_decls:
            info.param_decls = ("--" + field.name.replace("_", "-"),)  # or Typer adds --no-NAME
        if info.parser is not None:
            hint = list[str] if callable(field.default_factory) else str
        if callable(field.default_factory):
            default = field.default_factory()
        elif default is MISSING:
            default = inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hint, info],
            )
        )

    def run(**values: Any) -> int | None:
        return command(options(**values))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def seconds(text: str) -> float:
    """Parse a number above 0: a time or a rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text} is not a number above 0")
    return value


def server_url(text: str) -> str:
    """Parse the URL of a server."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an incomplete IPv6 address, a port that is no number
        valid = False
    if not valid:
        raise typer.BadParameter(
            f"{text!r} must begin with http:// or https:// and name a host, such as"
            " http://localhost:8080"
        )
    return text.rstrip("/")


def pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text} is not NAME=VALUE")
    return name, value
