"""Runs a Typer application: an error is one sentence on stderr and an exit status.

exit status: 0 success; 1 failure; 2 wrong usage; 130 interrupted
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import click
import typer
from rich.markup import escape

from command.errors import Failed, Problem
from command.options import as_function
from common.errors import EngineError

INTERRUPTED = 130
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def application(help: str | None = None) -> typer.Typer:
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        pretty_exceptions_enable=False,
        add_completion=help is not None,
        context_settings=HELP_NAMES,
    )


def add(
    app: typer.Typer, name: str, command: Callable[[Any], int | None], panel: str | None = None
) -> None:
    """Add a command. Its help ends with the part of its docstring that follows `Examples:`."""
    text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\n\nExamples:\n")
    app.command(
        name,
        rich_help_panel=panel,
        context_settings=HELP_NAMES,
        help=escape(text),
        # Typer joins lines that no blank line separates.
        epilog=escape("Examples:\n\n" + examples.replace("\n", "\n\n")) if examples else None,
    )(as_function(command))


def explain(error: Exception) -> tuple[int, str]:
    """Return an error's exit status and message. Raise `error` again if its type is unexpected."""
    if isinstance(error, click.UsageError):
        return 2, error.format_message()
    if isinstance(error, Problem):
        return 2, str(error)
    if isinstance(error, OSError) and error.strerror:  # without its number
        return 1, f"{error.filename}: " * (error.filename is not None) + error.strerror
    if isinstance(error, Failed | OSError):
        return 1, str(error)
    if isinstance(error, EngineError):
        return 1, error.message
    raise error


def check_unicode(arguments: list[str]) -> None:
    """Raise `Problem` for an argument that is not UTF-8, which no request or file can hold."""
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            shown = argument.encode("utf-8", "surrogateescape")
            raise Problem(
                f"{shown!r} is not UTF-8: use a terminal and names of files in UTF-8"
            ) from None


def run(
    app: typer.Typer,
    program: str,
    arguments: list[str] | None = None,
    explain: Callable[[Exception], tuple[int, str]] = explain,
) -> int:
    """Run a command line (default: that of this process) and return the exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    command = typer.main.get_command(app)
    names = command.commands if isinstance(command, click.Group) else ()
    name = arguments[0] if arguments and arguments[0] in names else program
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A message may show what is no UTF-8, such as a file's name.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        check_unicode(arguments)
        status = command.main(arguments, prog_name=program, standalone_mode=False) or 0
        if status == INTERRUPTED:  # by Ctrl-C, of which Typer prints nothing
            print(f"{name}: interrupted", file=sys.stderr)
        return int(status)
    except (BrokenPipeError, SystemExit) as error:  # the reader has closed, such as `| head`
        if not any(isinstance(e, BrokenPipeError) for e in (error, error.__context__)):
            raise  # Rich exits with 1 then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except Exception as error:
        status, text = explain(error)
        print(f"{name}: {text}", file=sys.stderr)
        return status
