"""Parses requests of OpenAI's API to requests to the engine.

The defaults are OpenAI's. Parameters that its API does not have, such as `repetition_penalty`, and
the texts at which an answer stops have the fine-tune's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from common import fields
from common.form import KINDS
from common.parameters import ALIASES, CHECKS, MAX_LOGPROBS, MAX_SEED, MAX_SEQUENCES
from serving.api import answer_form
from serving.api.answer_form import GivenForm
from serving.api.answering import MAX_SCORES, EngineRequest
from serving.api.openai import tools
from serving.api.openai.errors import Refused
from serving.api.openai.tools import ToolChoice
from serving.api.schemas import GROUPS, fields_of

Body = Mapping[str, Any]

DEFAULT_TOKENS = 16  # of a completion; a chat's answer may fill the context
MAX_TOKENS = 1_000_000
MAX_PROMPTS = 64
CONTEXT = 1024  # tokens of a GPT-2, prompt and answer
MAX_PARTS = 50_000  # messages or token ids, more than any context: checks block the event loop
ROLES = ("system", "user", "assistant")
# Fields about the account or the platform, accepted without effect on the answer.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    "guided_decoding_backend",
}
# Parameters that the engine has, too.
SAME = ("frequency_penalty", "presence_penalty", "stop", "choice_logprobs")
# Parameters that OpenAI's API does not have, by the names of vLLM, llama.cpp and their clients.
OURS = (*(name for name in GROUPS["engine"] if name not in KINDS), "repeat_penalty", "min_tokens")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
COMPLETION, CHAT = fields_of("OpenAICompletion"), fields_of("OpenAIChat")
NO_TOOLS = "asks for tools; these are for /v1/chat/completions, with a tool_choice"
NO_RESULTS = (
    "is not known to templates of these models: say what was called and what came of it in a"
    " message of the user's"
)
OLD_TOOLS = "is not known here; tools and tool_choice are"
# Fields that are not supported: why, and the values that are accepted as they have no effect.
NotDone = Mapping[str, tuple[str, tuple[Any, ...]]]
NOT_IN_COMPLETIONS: NotDone = {
    "suffix": ("asks for an insertion; these models only continue a text", ("",)),
}
NOT_IN_CHATS: NotDone = {
    "functions": (OLD_TOOLS, ([],)),
    "function_call": (OLD_TOOLS, ("none", "auto")),
    "modalities": ('can only be ["text"]', (["text"],)),
    "audio": ("is not made here", ()),
    "reasoning_effort": ("is for models that reason", ("none",)),
    "verbosity": ("is not supported by these models", ()),
    "web_search_options": ("is not supported: there is no search of the web", ()),
}


class Kind:
    """The request's field with the input for the engine, a prompt or a chat."""

    COMPLETION = "prompt"
    CHAT = "messages"


@dataclass(frozen=True, kw_only=True)
class ParsedRequest(EngineRequest):
    """A request to the engine, and the options of its answer in OpenAI's format.

    parameters: the engine's parameters, for `best_of` sequences of each prompt
    logprobs: whether the answer has log-probabilities
    only_echo: whether the answer has no new token; the engine generates one all the same
    continuous_usage: whether each chunk of a stream has the usage so far
    tool_choice: the function that the answer calls; None if it is text
    """

    model: str
    logprobs: bool = False
    echo: bool = False
    only_echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tool_choice: ToolChoice | None = None


def completion(body: Body) -> ParsedRequest:
    """Parse a body of /v1/completions. Raises `Refused`."""
    given = known_fields(body, COMPLETION, NOT_IN_COMPLETIONS)
    shared = common_fields(given)
    echo = fields.boolean("echo", given.get("echo", False))
    n: int = shared["n"]
    best_of = fields.integer("best_of", given.get("best_of", n), 1, MAX_SEQUENCES)
    if best_of < n:
        raise Refused("best_of", f"must be at least n, {n}, is {best_of}")
    if best_of > n and shared["stream"]:
        raise Refused("best_of", "above n is known only at the end of all answers: not in a stream")
    prompts = _prompts(given.get("prompt"))
    logprobs = given.get("logprobs")
    parameters = sampling(given, best_of, shared["form"])
    most = max_tokens(given, "max_tokens", DEFAULT_TOKENS, least=0 if echo else 1)
    parameters["max_new_tokens"] = max(most, 1)
    if logprobs is not None:
        parameters["logprobs"] = fields.integer("logprobs", logprobs, 0, MAX_LOGPROBS)
    elif best_of > n:
        parameters["logprobs"] = 0  # to rank the sequences
    if echo and (logprobs is not None or not all(isinstance(p, str) for p in prompts)):
        parameters["decoder_input_details"] = True
    _check_scores(parameters, len(prompts))
    return ParsedRequest(
        kind=Kind.COMPLETION,
        prompts=prompts,
        parameters=parameters,
        logprobs=logprobs is not None,
        echo=echo,
        only_echo=most == 0,
        **shared,
    )


def chat(body: Body) -> ParsedRequest:
    """Parse a body of /v1/chat/completions. Raises `Refused`."""
    given = known_fields(body, CHAT, NOT_IN_CHATS)
    shared = common_fields(given)
    logprobs = fields.boolean("logprobs", given.get("logprobs", False))
    top = fields.integer("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    if "top_logprobs" in given and not logprobs:
        raise Refused("top_logprobs", "needs logprobs true")
    tool_choice = tools.read(given)
    if tool_choice is not None:
        shared["form"] = answer_form.only([shared["form"], tool_choice.form])
    parameters = sampling(given, shared["n"], shared["form"])
    limit = "max_tokens" if given.get("max_completion_tokens") is None else "max_completion_tokens"
    parameters["max_new_tokens"] = max_tokens(given, limit, MAX_TOKENS)
    if logprobs:
        parameters["logprobs"] = top
    _check_scores(parameters, 1)
    return ParsedRequest(
        kind=Kind.CHAT,
        prompts=[messages(given.get("messages"))],
        parameters=parameters,
        logprobs=logprobs,
        tool_choice=tool_choice,
        **shared,
    )


def known_fields(body: Body, known: Set[str], not_done: NotDone) -> dict[str, Any]:
    """Return the fields of a body that are not null.

    Raises `Refused` for fields that are unknown, or not supported with a value that has an effect.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in not_done:
            reason, harmless = not_done[name]
            if value not in harmless:
                raise Refused(name, reason, "unsupported_parameter")
        elif name not in known | WITHOUT_EFFECT:
            message = f"is not known here; known are {', '.join(sorted(known))}"
            raise Refused(name, message, "unknown_parameter")
    return given


def common_fields(given: Body) -> dict[str, Any]:
    """Return those fields of `ParsedRequest` that all requests for text share."""
    if "model" not in given:
        raise Refused("model", "is missing, must name a model (GET /v1/models lists them)")
    stream = fields.boolean("stream", given.get("stream", False))
    options = mapping("stream_options", given.get("stream_options", {}))
    if options and not stream:
        raise Refused("stream_options", "are for streams: stream is not true")
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            message = f"is not known here; known are {', '.join(STREAM_OPTIONS)}"
            raise Refused(f"stream_options.{name}", message, "unknown_parameter")
        if value is not None:
            fields.boolean(f"stream_options.{name}", value)
    return {
        "model": text("model", given["model"]),
        "n": fields.integer("n", given.get("n", 1), 1, MAX_SEQUENCES),
        "stream": stream,
        "include_usage": bool(options.get("include_usage")),
        "continuous_usage": bool(
            options.get("include_usage") and options.get("continuous_usage_stats")
        ),
        "form": answer_form.read(given),
    }


def sampling(given: Body, sequences: int, form: GivenForm | None) -> dict[str, Any]:
    """Return the engine's parameters, except the number of tokens."""
    temperature = fields.number("temperature", given.get("temperature", 1.0), 0, 2)
    top_p = fields.number("top_p", given.get("top_p", 1.0), 0, 1)
    parameters: dict[str, Any] = {"num_return_sequences": sequences, "do_sample": True}
    if "logit_bias" in given:
        fields.biases("logit_bias", given["logit_bias"])
        parameters["logit_bias"] = given["logit_bias"]
    if "seed" in given:  # OpenAI's may be negative
        seed = fields.integer("seed", given["seed"], -MAX_SEED - 1, MAX_SEED)
        parameters["seed"] = seed & MAX_SEED
    parameters |= form.parameters if form else {}
    same = {name: ALIASES.get(name, name) for name in (*SAME, *OURS) if name in given}
    parameters |= {known: CHECKS[known](name, given[name]) for name, known in same.items()}
    if (temperature == 0 or top_p == 0) and sequences == 1:
        return {**parameters, "do_sample": False}
    if temperature == 0 or top_p == 0:  # greedy decoding, for several sequences
        return {**parameters, "temperature": 1.0, "top_p": 1.0, "top_k": 1}
    return {**parameters, "temperature": temperature, "top_p": top_p}


def max_tokens(given: Body, name: str, default: int, least: int = 1) -> int:
    return fields.integer(name, given.get(name, default), least, MAX_TOKENS)


def _check_scores(parameters: Mapping[str, Any], prompts: int) -> None:
    """Raise `Refused` if the answer could have more than `MAX_SCORES` log-probabilities."""
    if "logprobs" not in parameters:
        return
    whole = parameters.get("decoder_input_details")
    tokens = CONTEXT if whole else min(parameters["max_new_tokens"], CONTEXT)
    sequences = prompts * parameters["num_return_sequences"]
    scores = sequences * tokens * (parameters["logprobs"] + 1)
    if scores > MAX_SCORES:
        raise Refused(
            "logprobs",
            f"asks for up to {scores} log-probabilities, an answer has at most {MAX_SCORES}: of"
            f" {sequences} sequences of {tokens} tokens; ask for fewer at once",
        )


def _prompts(prompt: Any) -> list[Any]:
    """Return the prompts in the field `prompt`, each a text or a list of token ids."""
    if isinstance(prompt, list):
        bounded("prompt", prompt)
    several = prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]
    if not 1 <= len(several) <= MAX_PROMPTS:
        raise Refused("prompt", f"has {len(several)} prompts, can have {MAX_PROMPTS}")
    for one in several:
        if not isinstance(one, str) and not (is_ids(one) and one):
            raise Refused("prompt", "must be text, token ids, or a list of texts or of token ids")
        if isinstance(one, str):
            text("prompt", one)
    return several


def bounded(name: str, parts: list[Any]) -> None:
    if len(parts) > MAX_PARTS:
        raise Refused(name, f"has {len(parts)} parts, can have {MAX_PARTS}")


def messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise Refused("messages", "must be a list of messages that is not empty")
    bounded("messages", value)
    return [message(f"messages[{i}]", one) for i, one in enumerate(value)]


def message(name: str, value: Any, kinds: Sequence[str] = ("text",)) -> dict[str, str]:
    """Parse a message of a chat; the parts of its content may have a type of `kinds`."""
    given = {k: v for k, v in mapping(name, value).items() if v not in (None, [])}
    role = given.get("role")
    if role == "developer":  # OpenAI's newer name; templates know the older one
        role = "system"
    if role in ("tool", "function"):
        raise Refused(f"{name}.role", f"is {role}, which {NO_RESULTS}")
    if role not in ROLES:
        raise Refused(f"{name}.role", f"must be developer or one of {', '.join(ROLES)}")
    for field in given:
        if field in ("tool_calls", "function_call"):
            raise Refused(f"{name}.{field}", NO_RESULTS, "unsupported_parameter")
        if field not in ("role", "content", "name"):
            raise Refused(f"{name}.{field}", "is not known here", "unsupported_parameter")
    if role != "assistant" and "content" not in given:
        raise Refused(f"{name}.content", "is missing")
    parsed = {"role": role, "content": _content(f"{name}.content", given.get("content", ""), kinds)}
    if "name" in given:
        parsed["name"] = text(f"{name}.name", given["name"])
    return parsed


def _content(name: str, content: Any, kinds: Sequence[str]) -> str:
    """Return the text of a message's content, which is a text or a list of parts."""
    if not isinstance(content, list):
        return text(name, content)
    parts = []
    for i, part in enumerate(content):
        if mapping(f"{name}[{i}]", part).get("type") not in kinds:
            known = " or ".join(kinds)
            raise Refused(f"{name}[{i}].type", f"must be {known}: these models read text only")
        parts.append(text(f"{name}[{i}].text", part.get("text")))
    return "\n".join(parts)


def user(body: Body) -> str:
    """Return the user in OpenAI's field or its newer name; an alias chooses a model by it."""
    value = body.get("user") or body.get("safety_identifier")
    return value if isinstance(value, str) else ""


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(name, "must be text")
    if "\0" in value:
        raise Refused(name, "must be text without NUL")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(name, "must be an object")
    return value


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
