"""What other projects' clients make of a server, as JSON. Their environment is their own
(requirements/clients.txt), and they are one process, which imports what they share once:
`python -m tests.e2e.clients http://127.0.0.1:8080 KEY GRPC_ADDRESS TOKENIZER_FOLDER`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from functools import partial
from typing import Any, Literal

TEXT, CHAT, FORMED = "시/봄", "채팅", "정형"
PROMPT, QUESTION = "나는 오늘", "안녕?"
TOKENS = 9
FORM_TOKENS = 100


def review() -> Any:
    """A pydantic model, of which `FORMED` can write instances."""
    from pydantic import BaseModel, create_model

    rated: Any = {"감정": (Literal["긍정", "부정"], ...), "certain": (bool, ...)}
    return create_model("Review", __base__=BaseModel, __doc__="A review.", **rated)


def greedy(key: str) -> dict[str, Any]:
    limits = {"max_tokens": TOKENS, "max_retries": 0, "timeout": 60}
    return {"api_key": key, "temperature": 0, **limits}


def litellm(address: str, key: str) -> dict[str, Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from GitHub
    import litellm

    litellm.suppress_debug_info = True  # it is printed
    there = {"api_base": f"{address}/v1", **greedy(key)}
    text: Any = {"model": f"text-completion-openai/{TEXT}", "prompt": PROMPT, **there}
    messages = [{"role": "user", "content": QUESTION}]
    chat: Any = {"model": f"openai/{CHAT}", "messages": messages, **there}

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
    more = {"model": f"openai/{FORMED}", "max_tokens": FORM_TOKENS, "response_format": review()}
    formed: Any = litellm.completion(**chat | more)
    return {
        "completion": completion.choices[0].text,
        "streamed completion": "".join(
            chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)
        ),
        "chat": answer.choices[0].message.content,
        "streamed chat": asyncio.run(streamed()),
        "tokens": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "forms": [json.loads(formed.choices[0].message.content)],
        "no such model": error(chat | {"model": "openai/없음"}),
        "wrong key": error(chat | {"api_key": "틀린 열쇠".encode().hex()}),
        "no template": error(chat | {"model": f"openai/{TEXT}"}),
    }


def openai(address: str, key: str) -> dict[str, Any]:
    """An older one, by the Responses API."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    respond = client.responses.create
    asked: Any = {"model": CHAT, "input": QUESTION, "temperature": 0, "max_output_tokens": TOKENS}
    answer = respond(**asked)
    chat: Any = {"model": FORMED, "messages": [{"role": "user", "content": QUESTION}]}
    chat |= {"max_tokens": FORM_TOKENS}
    tool = openai.pydantic_function_tool(review())
    called = client.chat.completions.parse(**chat, tools=[tool], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls or []
    forms: list[Any] = [
        client.chat.completions.parse(**chat, response_format=review()).choices[0].message.parsed,
        client.responses.parse(model=FORMED, input=QUESTION, text_format=review()).output_parsed,
        call.function.parsed_arguments,
    ]
    return {
        "forms": [form.model_dump() for form in forms],
        "chat": answer.output_text,
        "streamed chat": "".join(
            event.delta
            for event in respond(**asked, stream=True)
            if event.type == "response.output_text.delta"
        ),
        "tokens": [answer.usage.input_tokens, answer.usage.output_tokens],
    }


def langchain(address: str, key: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI, OpenAI

    there = {"base_url": f"{address}/v1", **greedy(key)}
    text, chat = OpenAI(model=TEXT, **there), ChatOpenAI(model=CHAT, **there)
    responses = ChatOpenAI(model=CHAT, use_responses_api=True, **there)
    more = {"model": FORMED, "max_tokens": FORM_TOKENS}
    formed = ChatOpenAI(**there | more), ChatOpenAI(**there | more, use_responses_api=True)
    structured = [model.with_structured_output(review()) for model in formed]
    structured.append(formed[0].with_structured_output(review(), method="function_calling"))
    answer = chat.invoke([("user", QUESTION)])
    usage: Any = answer.usage_metadata
    forms: list[Any] = [model.invoke(QUESTION) for model in structured]
    return {
        "forms": [form.model_dump() for form in forms],
        "completion": text.invoke(PROMPT),
        "streamed completion": "".join(text.stream(PROMPT)),
        "chat": answer.content,
        "streamed chat": "".join(str(c.content) for c in chat.stream([("user", QUESTION)])),
        "tokens": [usage["input_tokens"], usage["output_tokens"]],
        "response": responses.invoke(QUESTION).text,
        "streamed response": "".join(chunk.text for chunk in responses.stream(QUESTION)),
    }


def llama_index(address: str, key: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    there = {"api_base": f"{address}/v1", **greedy(key)}
    text = OpenAILike(model=TEXT, **there)
    chat = OpenAILike(model=CHAT, is_chat_model=True, **there)
    messages = [ChatMessage(role="user", content=QUESTION)]
    more = {"model": FORMED, "max_tokens": FORM_TOKENS, "is_chat_model": True}
    formed = [
        OpenAILike(**there | more, is_function_calling_model=True),
        OpenAILike(**there | more, should_use_structured_outputs=True),
    ]
    return {
        "forms": [
            model.as_structured_llm(review()).complete(QUESTION).raw.model_dump()
            for model in formed
        ],
        "completion": text.complete(PROMPT).text,
        "streamed completion": "".join(c.delta or "" for c in text.stream_complete(PROMPT)),
        "chat": chat.chat(messages).message.content,
        "streamed chat": "".join(c.delta or "" for c in chat.stream_chat(messages)),
    }


def huggingface_hub(address: str, key: str) -> dict[str, Any]:
    """Call huggingface_hub's text_generation: tests/e2e/hugging_face_client.py."""
    from huggingface_hub import InferenceClient

    chat = InferenceClient(base_url=f"{address}/v1", api_key=key, timeout=60)
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "model": CHAT}
    asked |= {"max_tokens": TOKENS, "temperature": 0}
    answer = chat.chat_completion(**asked)
    chunks = chat.chat_completion(**asked, stream=True)
    formed = InferenceClient(f"{address}/predictions/{FORMED}", token=key, timeout=60)
    schema = review().model_json_schema()
    grammar: Any = {"type": "json", "value": schema}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "Review", "schema": schema}}
    more = {"model": FORMED, "max_tokens": FORM_TOKENS, "response_format": shape}
    return {
        "forms": [
            json.loads(formed.text_generation(PROMPT, max_new_tokens=FORM_TOKENS, grammar=grammar)),
            json.loads(chat.chat_completion(**asked | more).choices[0].message.content),
        ],
        "chat": answer.choices[0].message.content,
        "streamed chat": "".join(c.choices[0].delta.content or "" for c in chunks),
        "tokens": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    }


def kserve(address: str, key: str, grpc_address: str) -> dict[str, Any]:
    import numpy as np
    from kserve import (
        InferenceGRPCClient,
        InferenceRESTClient,
        InferInput,
        InferRequest,
        RESTConfig,
    )

    headers = {"authorization": f"Bearer {key}"}

    def request(binary: bool = False) -> Any:
        given = InferInput("text", [1], "BYTES", data=[PROMPT])
        if binary:
            given = InferInput("text", [1], "BYTES")
            given.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=True)
        parameters = {"max_new_tokens": TOKENS, "binary_data_output": binary}
        return InferRequest(TEXT, [given], parameters=parameters)

    def text(answer: Any) -> str:
        (made,) = answer.outputs[0].as_numpy()
        return made.decode() if isinstance(made, bytes) else str(made)

    async def rest() -> dict[str, Any]:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            bodies = [request(), request(binary=True)]
            named: Any = {"model_name": TEXT, "headers": headers}
            return {
                "completion": text(await client.infer(address, bodies[0], **named)),
                "binary completion": text(await client.infer(address, bodies[1], **named)),
                "ready": [
                    await client.is_server_live(address),
                    await client.is_server_ready(address),
                    await client.is_model_ready(address, TEXT, headers=headers),
                ],
            }

    async def grpc() -> dict[str, Any]:
        metadata = tuple(headers.items())
        async with InferenceGRPCClient(grpc_address) as client:
            return {
                "gRPC completion": text(await client.infer(request(), headers=metadata)),
                "gRPC ready": [
                    await client.is_server_live(),
                    await client.is_server_ready(),
                    await client.is_model_ready(TEXT, headers=metadata),
                ],
            }

    return {**asyncio.run(rest()), **asyncio.run(grpc())}


def lm_eval(address: str, key: str, tokenizer: str) -> dict[str, Any]:
    """Scores and texts of the chat model, asked as texts and as ids; `tokenizer` is its folder."""
    os.environ["OPENAI_API_KEY"] = key
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def instances(kind: Any, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]

    found = {}
    for ids in (False, True):
        model = LocalCompletionsAPI(
            base_url=f"{address}/v1/completions",
            model=CHAT,
            tokenizer=tokenizer,
            tokenized_requests=ids,
            max_retries=1,
        )
        scored = instances("loglikelihood", (PROMPT, " 말"), ("산에는", " 꽃 피네"))
        until = {"until": ["\n\n"], "max_gen_toks": TOKENS, "do_sample": False}
        found["ids" if ids else "texts"] = {
            "scores": model.loglikelihood(scored),
            "completion": model.generate_until(instances("generate_until", (PROMPT, until))),
        }
    return found


def main(address: str, key: str, grpc_address: str, tokenizer: str) -> dict[str, Any]:
    """Print the results by client, or why there are none."""
    clients: list[Any] = [litellm, openai, langchain, llama_index, huggingface_hub]
    clients += [partial(kserve, grpc_address=grpc_address), partial(lm_eval, tokenizer=tokenizer)]
    found = {}
    for client in clients:
        name = getattr(client, "func", client).__name__
        try:
            found[name] = client(address, key)
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
