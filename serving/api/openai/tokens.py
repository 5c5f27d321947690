"""vLLM's `POST /tokenize` and `/detokenize`: a text or a chat as a model's ids, and back.

{"model", "prompt", "add_special_tokens"?} or {"model", "messages"}, "return_token_strs"?
    -> {"count", "max_model_len", "tokens", "token_strs"}
{"model", "tokens"} -> {"prompt"}, without special tokens
"""

from __future__ import annotations

from typing import Any

from common import fields
from serving.api.engine_calls import left_s, while_restored
from serving.api.gateway import Gateway
from serving.api.openai.errors import Refused
from serving.api.openai.parsing import Body, is_ids, known_fields, messages, text
from serving.models.model import Model

TOKENIZE = {
    *("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"),
    *("return_token_strs", "continue_final_message"),
}
DETOKENIZE = {"model", "tokens"}


async def tokenize(gateway: Gateway, model: Model, body: Body, end: float) -> dict[str, Any]:
    """Answer a body of `/tokenize`. Raises `Refused`."""
    given = known_fields(body, TOKENIZE, {})
    if ("prompt" in given) == ("messages" in given):
        raise Refused("prompt", "or messages must be given, and not both")
    kind = "prompt" if "prompt" in given else "messages"
    inputs: Any = text(kind, given[kind]) if kind == "prompt" else messages(given[kind])
    for name, only in (("add_generation_prompt", True), ("continue_final_message", False)):
        if fields.boolean(name, given.get(name, only)) is not only:
            raise Refused(name, f"can only be {str(only).lower()}", "unsupported_parameter")
    special = fields.boolean("add_special_tokens", given.get("add_special_tokens", True))
    strings = fields.boolean("return_token_strs", given.get("return_token_strs", False))
    name = model.engine_name
    result = await while_restored(
        gateway,
        model,
        end,
        lambda: gateway.engine.tokenize(name, inputs, kind, special, left_s(end)),
    )
    return {
        "count": len(result["tokens"]),
        "max_model_len": result["max_length"],
        "tokens": result["tokens"],
        "token_strs": result["texts"] if strings else None,
    }


async def detokenize(gateway: Gateway, model: Model, body: Body, end: float) -> dict[str, Any]:
    """Answer a body of `/detokenize`. Raises `Refused`."""
    tokens: Any = known_fields(body, DETOKENIZE, {}).get("tokens")
    if not is_ids(tokens):
        raise Refused("tokens", "must be a list of token ids")
    name = model.engine_name
    result = await while_restored(
        gateway, model, end, lambda: gateway.engine.detokenize(name, tokens, left_s(end))
    )
    return {"prompt": result}
