"""Answers of OpenAI's completions and chats: whole bodies, and the chunks of streams."""

from __future__ import annotations

import codecs
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import orjson

from common.errors import ServiceError
from serving.api.answering import Renderer, event
from serving.api.engine_calls import choice_logprobs
from serving.api.openai.errors import error_body
from serving.api.openai.parsing import Kind, ParsedRequest
from serving.api.openai.tools import Call, message

Item = Mapping[str, Any]  # one token from the engine

DONE = b"data: [DONE]\n\n"
# For each kind: the prefix of ids, the `object` of a whole answer, and the `object` of a chunk.
NAMES = {
    Kind.COMPLETION: ("cmpl-", "text_completion", "text_completion"),
    Kind.CHAT: ("chatcmpl-", "chat.completion", "chat.completion.chunk"),
}


class Usage:
    """Counts the tokens of an answer, for its field `usage`."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = self.accepted = self.rejected = 0

    def add(self, tokens: int, made: Mapping[str, Any]) -> None:
        """Add a token of the engine's, or a completion."""
        self.completion += tokens
        self.accepted += made.get("accepted_tokens", 0)
        self.rejected += made.get("rejected_tokens", 0)

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            # Rejected tokens are in no answer and, unlike OpenAI's, not in `completion_tokens`.
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        }


class Answer(Renderer):
    """Writes one answer: the fields around its choices, and the choices of a whole answer."""

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._parsed = parsed
        prefix, self._whole, self._chunk = NAMES[parsed.kind]
        self._head = {"id": prefix + secrets.token_hex(12), "created": int(time.time())}
        self._head |= {"model": model}
        self.usage = Usage()

    # A whole answer

    def compact(self, token: Item) -> Item:
        if self._parsed.kind == Kind.CHAT:
            return compact(token)
        if "top" not in token or isinstance(token["top"], orjson.Fragment):
            return token
        top = {token_name(other): other["logprob"] for other in (*token["top"], token)}
        return {**token, "top": orjson.Fragment(orjson.dumps(top))}

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the body of a whole answer; `results` are the engine's answers to the prompts."""
        choices: list[dict[str, Any]] = []
        for prompt, result in zip(self._parsed.prompts, results, strict=True):
            completions = result["completions"]
            self.usage.prompt += result["prompt_tokens"]
            self.usage.cached += result["cached_tokens"]
            if not self._parsed.only_echo:
                for completion in completions:
                    self.usage.add(completion["tokens"], completion)
            for completion in self._best(completions):
                choices.append(self._choice(len(choices), prompt, completion))
        head = {**self._head, "object": self._whole}
        return orjson.dumps({**head, "choices": choices, "usage": self.usage.body()})

    def _best(self, completions: list[Any]) -> list[Any]:
        """Return the `n` answers whose tokens were the likeliest on average."""
        if self._parsed.n == len(completions):
            return completions

        def mean(completion: Mapping[str, Any]) -> float:
            return fmean(step["logprob"] for step in completion["logprobs"])

        return sorted(completions, key=mean, reverse=True)[: self._parsed.n]

    def _choice(self, index: int, prompt: Any, completion: Mapping[str, Any]) -> dict[str, Any]:
        text, steps = completion["text"], completion.get("logprobs", [])
        reason, offsets, echoed = completion["finish_reason"], Offsets(), 0
        if self._parsed.only_echo:
            text, steps, reason = "", [], "length"
        if self._parsed.echo:
            prefill = completion.get("prefill", [])
            before, prefill = _echo(prompt, prefill, offsets)
            text, steps, echoed = before + text, [*prefill, *steps], len(prefill)
        logprobs = self.logprobs(steps, offsets, echoed) if self._parsed.logprobs else None
        ending = {"logprobs": logprobs, "finish_reason": self.finish_reason(reason)}
        ending |= choice_logprobs(completion)
        if self._parsed.tool_choice is not None:
            return {"index": index, "message": message(self._parsed.tool_choice, text), **ending}
        if self._parsed.kind == Kind.CHAT:
            answer = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": answer, **ending}
        return {"index": index, "text": text, **ending}

    def finish_reason(self, reason: str) -> str:
        choice = self._parsed.tool_choice
        return choice.finish_reason if choice is not None and reason == "stop" else reason

    def logprobs(
        self, steps: Sequence[Mapping[str, Any]], offsets: Offsets, echoed: int = 0
    ) -> dict[str, Any]:
        """Return the `logprobs` of tokens, of which the first `echoed` are the prompt's."""
        if self._parsed.kind == Kind.CHAT:
            return {"content": [chat_logprobs(step) for step in steps], "refusal": None}
        return {
            "tokens": [token_name(step) for step in steps],
            # The first token of a prompt has no log-probability.
            "token_logprobs": [step.get("logprob") for step in steps],
            "top_logprobs": [self.compact(step).get("top") for step in steps],
            "text_offset": [offsets.next(step, i < echoed) for i, step in enumerate(steps)],
        }

    # A stream

    def choices(self, prompt: Any, first: int) -> Choices:
        return Choices(self, self._parsed, prompt, first)

    def broken(self, error: ServiceError) -> bytes:
        return event(error_body(error))

    def chunk(self, choices: Sequence[Mapping[str, Any]], usage: Any = None) -> bytes:
        body = {**self._head, "object": self._chunk, "choices": choices}
        if self._parsed.continuous_usage:
            body["usage"] = self.usage.body()
        elif self._parsed.include_usage:
            body["usage"] = usage
        return event(body)

    def end(self) -> bytes:
        """Return the end of a stream: its usage, if the request includes it, and `[DONE]`."""
        usage = self.chunk([], self.usage.body()) if self._parsed.include_usage else b""
        return usage + DONE


class Choices:
    """Writes the choices of a stream that continue one prompt; their indexes begin at `first`."""

    def __init__(self, answer: Answer, parsed: ParsedRequest, prompt: Any, first: int) -> None:
        self._answer, self._parsed, self._prompt, self._first = answer, parsed, prompt, first
        self._offsets: dict[int, Offsets] = defaultdict(Offsets)
        self._calls: dict[int, Call] = {}

    def write(self, item: Item) -> bytes:
        """Return a token's chunks; before a choice's first token, its role or the prompt's echo."""
        index, reason, usage = item["index"], item.get("finish_reason"), self._answer.usage
        if not self._offsets:  # the first token of all choices
            usage.prompt += item["prompt_tokens"]
            usage.cached += item["cached_tokens"]
        begun = b"" if index in self._offsets else self._begin(index, item.get("prefill", []))
        if self._parsed.only_echo:
            end = {"index": self._first + index, "text": "", "logprobs": None}
            return begun + self._answer.chunk([{**end, "finish_reason": "length"}])
        usage.add(1, item)
        return begun + self._token(item, reason)

    def _begin(self, index: int, prefill: Sequence[Item]) -> bytes:
        offsets = self._offsets[index]
        choice: dict[str, Any] = {"index": self._first + index, "logprobs": None}
        if self._parsed.kind == Kind.CHAT:
            content = "" if self._parsed.tool_choice is None else None
            choice["delta"] = {"role": "assistant", "content": content, "refusal": None}
        elif self._parsed.echo:
            choice["text"], prefill = _echo(self._prompt, prefill, offsets)
            if self._parsed.logprobs:
                choice["logprobs"] = self._answer.logprobs(prefill, offsets, len(prefill))
        else:
            return b""
        return self._answer.chunk([{**choice, "finish_reason": None}])

    def _token(self, item: Item, reason: str | None) -> bytes:
        """Return a token's chunks; without text, only scores and a choice's end need any."""
        choice: dict[str, Any] = {"index": self._first + item["index"], "logprobs": None}
        labels = choice_logprobs(item)
        if self._parsed.logprobs:
            offsets = self._offsets[item["index"]]
            choice["logprobs"] = self._answer.logprobs([item["logprobs"]], offsets)
        elif not item["text"] and reason is None:
            return b""
        if self._parsed.kind == Kind.COMPLETION:
            ending = {"text": item["text"], "finish_reason": reason, **labels}
            return self._answer.chunk([{**choice, **ending}])
        sent, ended = b"", reason is not None
        for delta in self._deltas(item, ended):
            sent += self._answer.chunk([{**choice, "delta": delta, "finish_reason": None}])
            choice["logprobs"] = None
        if reason is not None:
            ending = {"delta": {}, "finish_reason": self._answer.finish_reason(reason), **labels}
            sent += self._answer.chunk([{**choice, **ending}])
        return sent

    def _deltas(self, item: Item, ended: bool) -> list[dict[str, Any]]:
        """Return the deltas of a chat's token; log-probabilities need one even without text."""
        text, tools = item["text"], self._parsed.tool_choice
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        if tools is not None:
            call = self._calls.get(item["index"]) or Call(tools)
            self._calls[item["index"]] = call
            deltas = [{"tool_calls": [delta]} for delta in call.write(text, ended)]
        return deltas or ([{"content": ""}] if self._parsed.logprobs else [])


class Offsets:
    """Computes where in an answer's text each of its tokens begins, in characters.

    unseen: number of characters that the tokens have before the text, such as a space
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = self.unseen = 0

    def next(self, token: Item, echoed: bool) -> int:
        """Return where a token begins. Control tokens have text in an echoed prompt only."""
        at = self._at
        if echoed or not token.get("special"):
            self._at += len(self._utf8.decode(bytes(_bytes(token))))
        return max(at - self.unseen, 0)


def _echo(prompt: Any, prefill: Sequence[Item], offsets: Offsets) -> tuple[str, Sequence[Item]]:
    """Return a prompt as text, and its tokens; `<s>`, added by the tokenizer, is not among them.
    Clients such as lm-eval find a text's scores by the number of the text's own tokens."""
    if isinstance(prompt, str):
        put = [bool(t.get("special")) and not prompt.startswith(t["text"]) for t in prefill]
        prefill = prefill[[*put, False].index(False) :]
    echo = b"".join(bytes(_bytes(token)) for token in prefill).decode("utf-8", "replace")
    if not isinstance(prompt, str):
        return echo, prefill
    offsets.unseen = max(len(echo) - len(prompt), 0)
    return prompt, prefill


def _bytes(token: Mapping[str, Any]) -> list[int]:
    """Return a token's bytes, which the engine sends only if they are not a whole text."""
    return token.get("bytes") or list(token["text"].encode())


def token_name(token: Mapping[str, Any]) -> str:
    """Return a token's text, or its bytes as OpenAI writes them if it is a part of a character."""
    if "bytes" in token:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])
    return str(token["text"])


def compact(token: Item) -> Item:
    """Return a chat's token with `top` as JSON, which takes a tenth of the objects' memory."""
    if isinstance(token["top"], orjson.Fragment):
        return token
    top = orjson.dumps([_shown(other) for other in token["top"]])
    return {**token, "top": orjson.Fragment(top)}


def chat_logprobs(step: Item) -> dict[str, Any]:
    return {**_shown(step), "top_logprobs": compact(step)["top"]}


def _shown(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token_name(token), "logprob": token["logprob"], "bytes": _bytes(token)}
