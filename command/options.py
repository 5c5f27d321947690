"""Options of a command as a dataclass, which Typer gets as the parameters of a function.

    @dataclass(kw_only=True)
    class Logs(Aws):
        name: str = argument("of the deployment")
        follow: bool = option(False, "go on until Ctrl-C")

    def logs(options: Logs) -> None: ...

So commands share options by inheritance, and what they call takes them typed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field that is `--its-name`. A default of `...` has to be given."""
    return _field(default, typer.Option(..., *names, help=escape(help), **more))


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """A field without a name on the command line."""
    return _field(default, typer.Argument(help=escape(help), **more))


def _field(default: Any, info: Any) -> Any:
    if default is ...:
        return field(metadata={"typer": info})
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"typer": info})
    return field(default=default, metadata={"typer": info})


def as_function(command: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """The command as a function with a parameter for each field of its options."""
    (options,) = (t for n, t in get_type_hints(command).items() if n != "return")
    hints = get_type_hints(options)
    taken = []
    for one in fields(options):
        info, hint, default = copy(one.metadata["typer"]), hints[one.name], one.default
        if hint is bool and not info.param_decls:
            info.param_decls = ("--" + one.name.replace("_", "-"),)  # and no --no-...
        if info.parser is not None:
            hint = list[str] if callable(one.default_factory) else str
        if callable(one.default_factory):
            default = one.default_factory()
        elif default is MISSING:
            default = inspect.Parameter.empty
        taken.append(
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hint, info],
            )
        )

    def run(**given: Any) -> int | None:
        return command(options(**given))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in taken}
    vars(run)["__signature__"] = inspect.Signature(taken)
    return run


def seconds(text: str) -> float:
    """Parses a time, or a rate: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text} is not a number above 0")
    return value


def pair(text: str) -> tuple[str, str]:
    """Parses NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text} is not NAME=VALUE")
    return name, value
