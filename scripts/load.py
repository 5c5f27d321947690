"""`kogpt2 load`: loads a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from command.errors import Problem
from command.options import argument, option, pair
from scripts.client.management import Management, call


@dataclass(kw_only=True)
class Load(Management):
    name: str = argument("the name in requests")
    artifact: str | None = argument("the model's name in the store (default: NAME)", None)
    setting: list[tuple[str, str]] = option(
        [], "a setting of this model; repeatable", parser=pair, metavar="NAME=VALUE"
    )


def run(options: Load) -> None:
    """Load a model from the server's store. A request for a model in the store loads it, too.

    Examples:
    kogpt2 load sowol
    kogpt2 load spring poems/2026/spring --setting backend=native --setting precision=int8
    """
    query = {"model_name": options.name, "url": options.artifact or options.name}
    settings = dict(options.setting)
    for name in query.keys() & settings.keys():
        raise Problem(f"--setting {name}: give it as an argument, NAME or ARTIFACT")
    answer = call(options, "POST", "/models", query | settings)
    for warning in answer.get("warnings", ()):
        print(warning, file=sys.stderr)
    print(answer["status"])
