"""`kogpt2 invoke`: sends a prompt to a server or a SageMaker endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from command.errors import Problem
from command.options import option
from scripts.client.prompt import Prompt, send


@dataclass(kw_only=True)
class Invoke(Prompt):
    model: str | None = option(
        None, "the fine-tune, with or without .tar.gz (default: the endpoint's only one)"
    )
    text: str | None = option(None, "the prompt (default: standard input)")
    stream: bool = option(False, "print the text while it is generated")


def run(options: Invoke) -> None:
    """Send one prompt to one fine-tune, on your own server or on a SageMaker endpoint.

    The prompt is --text or standard input, in UTF-8. Prints the generated text, with --json the
    whole answer, and with --stream the text as it is generated, if the server can stream.

    Examples:
    kogpt2 invoke --model sowol --text "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 invoke --model sowol --json
    kogpt2 invoke --endpoint poets --model team/sowol --text "산에는 꽃 피네"
    kogpt2 invoke --endpoint one-model --text "산에는 꽃 피네" --stream
    """
    if options.stream and options.endpoint and options.model:
        raise Problem("SageMaker streams from endpoints of a single model only: leave out --stream")
    send(options, options.model, options.text, stream=options.stream)
