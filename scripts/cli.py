"""`kogpt2`: the one command for everything that this project does.

exit status: 0 done; 1 it failed; 2 something given cannot be used; 130 interrupted
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import typer
from rich.markup import escape

from benchmarks import bench, profile
from benchmarks.gpu import check as gpu_check
from scripts import options
from scripts.aws import deploy, logs, push, status, teardown, upload
from scripts.chaos import chaos
from scripts.client import ask, latency_table, manage
from scripts.lib import convert, fine_tune, package, settings
from scripts.lib.problem import Failed, Problem
from scripts.load import load_test

INTERRUPTED = 130
ROOT = Path(__file__).resolve().parent.parent
app = typer.Typer(
    help="Serves many fine-tunes of KoGPT2 at once, and does all around it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS: dict[str, dict[str, Callable[[Any], int | None]]] = {
    "A server's models": {
        "ask": ask.ask,
        "models": manage.models,
        "load": manage.load,
        "unload": manage.unload,
    },
    "Fine-tunes": {
        "fine-tune": fine_tune.run,
        "package": package.run,
        "convert": convert.run,
    },
    "SageMaker": {
        "push": push.run,
        "upload": upload.run,
        "deploy": deploy.run,
        "status": status.run,
        "invoke": ask.invoke,
        "logs": logs.run,
        "teardown": teardown.run,
    },
    "Measuring": {
        "bench": bench.run,
        "load-test": load_test.run,
        "latency-table": latency_table.run,
        "profile": profile.run,
        "gpu-check": gpu_check.run,
        "chaos": chaos.run,
    },
    "About": {"settings": settings.run},
}
SHELL = {
    "serve": "Starts the server on this machine, without a container.",
    "build": "Builds an image of the server.",
    "run": "Runs the image in a container that may do as little as possible.",
}


def through_shell(name: str) -> Callable[[typer.Context], None]:
    """scripts/NAME, which a fresh clone can call without anything."""

    def run(context: typer.Context) -> None:
        command = [str(ROOT / "scripts" / name)]
        if not (ROOT / "pyproject.toml").exists():  # installed as a package
            if name != "serve":
                raise Problem(f"{name} needs a checkout of the project")
            command = [sys.executable, "-m", "serving.entrypoint", name]
        os.execv(command[0], [*command, *context.args])  # noqa: S606

    run.__doc__ = SHELL[name]
    return run


for _name in SHELL:
    app.command(
        _name,
        rich_help_panel="The server",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(through_shell(_name))
for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        _said, _, _examples = inspect.cleandoc(_command.__doc__ or "").partition("\n\nExamples:\n")
        app.command(
            _name,
            rich_help_panel=_panel,
            help=escape(_said),
            # Blank lines, because Typer joins others.
            epilog=escape("Examples:\n\n" + _examples.replace("\n", "\n\n")) if _examples else None,
        )(options.as_function(_command))


def explain(error: Exception) -> tuple[int, str]:
    """The exit status and one sentence. Raises `error` where it is a defect."""
    if isinstance(error, click.UsageError):
        return 2, error.format_message()
    if isinstance(error, Problem):
        return 2, str(error)
    if isinstance(error, Failed | OSError):
        return 1, str(error)
    from common.errors import EngineError
    from scripts.aws import errors

    text = error.message if isinstance(error, EngineError) else errors.explain(error)
    if text is None:
        raise error
    return 1, text


def main(argv: list[str] | None = None) -> int:
    """Runs a command; says errors in one sentence."""
    given = sys.argv[1:] if argv is None else argv
    name = given[0] if given and given[0] in app_names() else "kogpt2"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    try:
        command = typer.main.get_command(app)
        code = command.main(given, prog_name="kogpt2", standalone_mode=False) or 0
        if code == INTERRUPTED:  # which Typer does not say
            print(f"{name}: interrupted", file=sys.stderr)
        return int(code)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except Exception as error:
        code, text = explain(error)
        print(f"{name}: {text}", file=sys.stderr)
        return code


def app_names() -> set[str]:
    return {*SHELL, *(name for commands in PANELS.values() for name in commands)}


if __name__ == "__main__":
    sys.exit(main())
