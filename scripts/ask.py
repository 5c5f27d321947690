"""`kogpt2 ask`: sends a prompt to a model and streams its answer, or a file of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command.errors import Problem
from command.options import argument, option, seconds
from scripts.client.prompt import Prompt, send


@dataclass(kw_only=True)
class Ask(Prompt):
    model: str = argument("the fine-tune")
    text: str | None = argument("the prompt (default: standard input)", None)
    stream: bool = option(True, "print the text while it is generated", "--stream/--no-stream")
    wait: float = option(
        "360",
        "how long to retry while SageMaker loads the model, or requests of --file fail, seconds",
        parser=seconds,
        metavar="S",
    )
    file: Path | None = option(
        None, "a file of requests, a JSON value a line, instead of a prompt", metavar="FILE"
    )
    out: Path | None = option(
        None, "where the answers to --file go, a line each; what it has is not sent", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) != (self.out is None):
            raise Problem("--file and --out belong together")
        if self.file is not None and (self.text is not None or self.json or self.dry_run):
            raise Problem("--file takes no prompt, no --json and no --dry-run")


def run(options: Ask) -> int:
    """Continue a prompt with a fine-tune, and print the text while it is generated.

    With --file it answers a file of JSON lines, each as /predictions takes it: an object with
    inputs and parameters, or a text. Sampling options are for all lines that do not set them. The
    answers are in the order of the lines; a wrong line has {"error": {...}} and makes the exit
    status 1. Blank lines are left out. An interrupted command continues where it stopped, when it
    is run again.

    Examples:
    kogpt2 ask sowol "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 ask sowol --temperature 0.8 --seed 1
    kogpt2 ask sowol --file reviews.jsonl --out answers.jsonl --max-new-tokens 8
    """
    if options.file is not None and options.out is not None:
        from scripts.client.lines import send_file

        return send_file(options, options.model, options.file, options.out)
    send(options, options.model, options.text, stream=options.stream)
    return 0
