"""`kogpt2`: one command for a server, its models, SageMaker and benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from command import program
from command.environments import ROOT
from command.errors import Problem
from scripts import (
    ask,
    convert,
    deploy,
    fine_tune,
    invoke,
    latency_table,
    load,
    load_test,
    logs,
    models,
    package,
    push,
    settings,
    status,
    teardown,
    unload,
    upload,
)

app = program.application("Serve many KoGPT2 fine-tunes at once, and manage them.")
PANELS: dict[str, dict[str, Callable[[Any], int | None]]] = {
    "A server's models": {
        "ask": ask.run,
        "models": models.run,
        "load": load.run,
        "unload": unload.run,
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
        "invoke": invoke.run,
        "logs": logs.run,
        "teardown": teardown.run,
    },
    "Measuring": {"load-test": load_test.run, "latency-table": latency_table.run},
    "About": {"settings": settings.run},
}
# Commands that are separate programs, by panel. They print their own --help.
SHELL = {
    "serve": "Start the server on this machine, without a container.",
    "build": "Build an image of the server.",
    "run": "Run the image in a container with as few rights as possible.",
}
BENCHMARKS = {
    "bench": "Measure this server's engine side by side with others.",
    "profile": "Show where a decode step's time goes in the native library.",
    "gpu-check": "Check and measure both backends on this machine's GPU.",
}


def command_line(name: str) -> list[str]:
    """Return a separate program's command line: scripts/NAME or `python -m benchmarks NAME`."""
    if name in BENCHMARKS:
        return [sys.executable, "-m", "benchmarks", name]
    if (ROOT / "pyproject.toml").exists():
        return [str(ROOT / "scripts" / name)]
    if name == "serve":  # installed as a package
        return [sys.executable, "-m", "serving.entrypoint", name]
    raise Problem(f"{name} needs a checkout of the project")


def replace_process(name: str, help: str) -> Callable[[typer.Context], None]:
    """Return a command that replaces this process by a separate program."""

    def run(context: typer.Context) -> None:
        command = command_line(name)
        os.execv(command[0], [*command, *context.args])  # noqa: S606

    run.__doc__ = help
    return run


def add_programs(programs: dict[str, str], panel: str) -> None:
    for name, help in programs.items():
        app.command(
            name,
            rich_help_panel=panel,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(replace_process(name, help))


add_programs(SHELL, "The server")
for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        program.add(app, _name, _command, _panel)
add_programs(BENCHMARKS, "Measuring")


def explain(error: Exception) -> tuple[int, str]:
    """Return an error's exit status and message, as `program.explain`, also of boto3's errors."""
    try:
        return program.explain(error)
    except Exception:
        from scripts.aws import errors

        if (text := errors.explain(error)) is None:
            raise
        return 1, text


def main(arguments: list[str] | None = None) -> int:
    return program.run(app, "kogpt2", arguments, explain)
