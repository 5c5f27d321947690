"""`kogpt2 ask`: sends a prompt to a model and streams its answer."""

from __future__ import annotations

from dataclasses import dataclass

from command.options import argument, option
from scripts.client.prompt import Prompt, send


@dataclass(kw_only=True)
class Ask(Prompt):
    model: str = argument("the fine-tune")
    text: str | None = argument("the prompt (default: standard input)", None)
    stream: bool = option(True, "print the text while it is generated", "--stream/--no-stream")


def run(options: Ask) -> None:
    """Has a fine-tune continue a prompt, and prints the text while it is generated.

    Examples:
    kogpt2 ask sowol "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 ask sowol --temperature 0.8 --seed 1
    """
    send(options, options.model, options.text, stream=options.stream)
