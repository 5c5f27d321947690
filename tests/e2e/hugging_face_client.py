"""What `huggingface_hub`'s text_generation makes of a model, as JSON:
`python -m tests.e2e.hugging_face_client http://127.0.0.1:8080/predictions/NAME KEY`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.inference._common import ValidationError

PROMPT = "나는 오늘"


def asked(address: str, key: str) -> dict[str, Any]:
    ask = InferenceClient(address, token=key, timeout=60).text_generation
    told: dict[str, Any] = {"details": True, "max_new_tokens": 12}

    def error(**more: Any) -> list[str]:
        try:
            ask(PROMPT, **more)
        except (ValidationError, HfHubHTTPError) as error:
            return [type(error).__name__, str(error)]
        return []

    text = ask(PROMPT, max_new_tokens=12)
    return {
        "text": text,
        "full": ask(PROMPT, max_new_tokens=12, return_full_text=True),
        "details": asdict(ask(PROMPT, **told, decoder_input_details=True)),
        "stopped": asdict(ask(PROMPT, **told, stop=[text[4:6]])),
        "stream": list(ask(PROMPT, max_new_tokens=12, stream=True)),
        "stream of details": [asdict(one) for one in ask(PROMPT, **told, stream=True, seed=3)],
        "likeliest": [
            asdict(one)["top_tokens"] for one in ask(PROMPT, **told, stream=True, top_n_tokens=2)
        ],
        "drawn": [ask(PROMPT, max_new_tokens=12, temperature=2.0) for _ in range(3)],
        "adapter": ask(PROMPT, max_new_tokens=12, adapter_id="여름"),
        "no such adapter": error(adapter_id="겨울"),
        "wrong": error(max_new_tokens=0),
        "form": ask(PROMPT, grammar={"type": "regex", "value": "산에는|꽃"}),  # type: ignore
        "wrong form": error(grammar={"type": "regex", "value": "("}),
        "not done": error(watermark=True),
    }


if __name__ == "__main__":
    print(json.dumps(asked(*sys.argv[1:])))
