"""What LiteLLM makes of a server, as JSON. Its environment is its own (requirements/clients.txt):
`python -m tests.e2e.litellm_client http://127.0.0.1:8080/v1 KEY`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from GitHub

import litellm

litellm.suppress_debug_info = True  # it is printed


def asked(address: str, key: str) -> dict[str, Any]:
    there: dict[str, Any] = {"api_base": address, "api_key": key, "temperature": 0}
    there |= {"max_tokens": 9, "max_retries": 0, "timeout": 60}
    text: Any = {"model": "text-completion-openai/시/봄", "prompt": "나는 오늘", **there}
    chat: Any = {
        "model": "openai/채팅",
        "messages": [{"role": "user", "content": "안녕?"}],
        **there,
    }

    async def streamed() -> str:
        chunks = await litellm.acompletion(**chat, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    def error(call: dict[str, Any]) -> list[Any]:
        try:
            litellm.completion(**call)
        except Exception as error:
            return [type(error).__name__, getattr(error, "status_code", None), str(error)]
        return []

    completion, answer = litellm.text_completion(**text), litellm.completion(**chat)
    return {
        "completion": completion.choices[0].text,
        "streamed completion": "".join(
            chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)
        ),
        "chat": answer.choices[0].message.content,
        "streamed chat": asyncio.run(streamed()),
        "tokens": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "no such model": error(chat | {"model": "openai/없음"}),
        "wrong key": error(chat | {"api_key": "틀린 열쇠".encode().hex()}),
        "no template": error(chat | {"model": "openai/여름"}),
    }


if __name__ == "__main__":
    print(json.dumps(asked(*sys.argv[1:])))
