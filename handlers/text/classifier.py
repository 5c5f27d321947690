"""Requests to a classifier, and answers as Hugging Face's inference toolkit gives them.

{"inputs": text}      ->  [{"label", "score"}], the best label
{"inputs": [texts]}   ->  [{"label", "score"}, ...], the best label of each text
{"inputs": {"text", "text_pair"}}  ->  {"label", "score"}; also in a list
"parameters": {"top_k": n or null}  ->  a text's n best labels, or all, as a list: for a list of
    texts, a list for each
of tokens: {"inputs": text}  ->  [{"entity", "score", "index", "word", "start", "end"}, ...]; for a
    list of texts, a list for each
text/plain            ->  as {"inputs": text}
text/csv, a column `inputs`, or `text` and `text_pair`  ->  as a list; text/csv, if accepted
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common import fields
from common.errors import InvalidRequest, UnsupportedMediaType
from common.json_body import MAX_VALUES, read_json, read_text
from common.media_types import CSV, JSON, TEXT, accepted, media_type
from engine.http.client import ModelHandle
from handlers.model_spec import client_name
from handlers.payload import to_json
from handlers.request_id import request_id, token_counts
from handlers.text import classifier_v2
from handlers.text.bulk import Convert, classify
from handlers.text.labels import FUNCTIONS, OUTSIDE, Options, entities, ranked

MAX_TEXTS = 10_000
STRATEGIES = ("none", "simple")
PAIR = ("text", "text_pair")


@dataclass(frozen=True)
class ClassifyRequest:
    """A checked request; each text is a list of one text, or of the two of a pair.

    form: what the client sent, "text", "pair" or "list"
    """

    texts: Sequence[Sequence[str]]
    form: str
    options: Options = field(default_factory=Options)
    answers_csv: bool = False


def metadata(name: str, classifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/{name}`."""
    return classifier_v2.metadata(name, classifier)


def answer(
    model: ModelHandle, body: bytes, content_type: str | None, accept: str | None, timeout_s: float
) -> tuple[bytes, str]:
    """Classify the texts in `body`. Raises `EngineError`."""
    about = model.model["classifier"]

    def run(
        texts: Sequence[Sequence[str]], truncate: bool, listed: bool, convert: Convert
    ) -> list[list[Any]]:
        if about["of_tokens"] and any(len(parts) > 1 for parts in texts):
            raise InvalidRequest("inputs has a text_pair, but this classifier is of single texts")
        made = classify(model, texts, truncate, listed, timeout_s, request_id.get(), convert)
        token_counts.set((made.prompt_tokens, 0))
        return made.entries

    v2_request = classifier_v2.parse(body, content_type, about)
    if v2_request is not None:
        options = read_options(v2_request.parameters, about["of_tokens"], of_v2=True)
        texts = _checked(v2_request.texts, True)
        rows = run(texts, options.truncate, True, v2_request.converter(about, options))
        name = client_name(model.model["name"])
        return classifier_v2.answer(v2_request, name, rows, about)
    request = parse(body, content_type, about["of_tokens"])
    kinds = (
        (CSV, JSON) if request.answers_csv else (JSON, CSV) if request.form == "list" else (JSON,)
    )
    kind = accepted(accept, kinds)
    if kind == CSV:
        request = replace(request, options=replace(request.options, listed=True))
    convert = functools.partial(text_entries, about=about, options=request.options)
    entries = run(request.texts, request.options.truncate, request.form == "list", convert)
    formatted = format_answer(request, entries, about)
    return (_to_csv(formatted), CSV) if kind == CSV else (to_json(formatted), JSON)


def parse(body: bytes, content_type: str | None, of_tokens: bool = False) -> ClassifyRequest:
    """Parse a body. Raises `InvalidRequest` with the field, or `UnsupportedMediaType`."""
    kind, _ = media_type(content_type)
    if kind == TEXT:
        return ClassifyRequest(_checked([read_text(body)], False), "text")
    if kind == CSV:
        return ClassifyRequest(
            _checked(_csv_inputs(read_text(body)), True), "list", answers_csv=True
        )
    if kind != JSON:
        raise UnsupportedMediaType(
            f"Content-Type is {content_type}, must be {JSON}, {TEXT} or {CSV} in UTF-8"
        )
    value = read_json(body, MAX_VALUES)
    if not isinstance(value, dict) or "inputs" not in value:
        raise InvalidRequest(
            'the body must be {"inputs": text, or a list of texts, "parameters": {...}}'
        )
    for name in value:
        if name not in ("inputs", "parameters", "stream"):  # labels are whole in any case
            raise InvalidRequest(
                f"{name} is not known to a classifier; known are inputs, parameters"
            )
    inputs, options = value["inputs"], read_options(value.get("parameters"), of_tokens)
    if isinstance(inputs, list):
        return ClassifyRequest(_checked(inputs, True), "list", options)
    form = "pair" if isinstance(inputs, dict) else "text"
    return ClassifyRequest(_checked([inputs], False), form, options)


def read_options(given: Any, of_tokens: bool, of_v2: bool = False) -> Options:
    """Check the parameters of a request. Raises `InvalidRequest` with the field."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InvalidRequest("parameters must be a JSON object")
    checks: dict[str, Callable[[str, Any], Any]] = {"truncation": fields.boolean}
    if of_tokens:
        checks |= {"aggregation_strategy": _strategy, "ignore_labels": _labels}
    else:
        checks |= {"function_to_apply": _function}
        if not of_v2:  # whose outputs are of one label, or of all
            checks |= {"top_k": _top_k}
    values = {}
    for name, value in given.items():
        if name not in checks:
            known = ", ".join(sorted(checks))
            raise InvalidRequest(
                f"parameters.{name} is not known to this classifier; known are {known}"
            )
        values[name] = checks[name](f"parameters.{name}", value)
    return Options(
        truncate=values.get("truncation", False),
        top_k=values.get("top_k", 1),
        listed="top_k" in values,
        function=values.get("function_to_apply"),
        grouped=values.get("aggregation_strategy") == "simple",
        ignored=values.get("ignore_labels", (OUTSIDE,)),
    )


def _top_k(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidRequest(f"{name} must be an integer of at least 1, or null for all labels")
    return value


def _function(name: str, value: Any) -> str | None:
    if value is not None and value not in FUNCTIONS:
        raise InvalidRequest(f"{name} must be one of {', '.join(FUNCTIONS)}")
    return None if value is None else str(value)


def _strategy(name: str, value: Any) -> str:
    if value not in STRATEGIES:
        raise InvalidRequest(f"{name} must be one of {', '.join(STRATEGIES)}")
    return str(value)


def _labels(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise InvalidRequest(f"{name} must be a list of labels")
    return tuple(value)


def _checked(inputs: Sequence[Any], listed: bool) -> list[list[str]]:
    """Return the parts of each text. Raises `InvalidRequest` with its place."""
    if not inputs:
        raise InvalidRequest("inputs is empty, must be text or a list of texts")
    if len(inputs) > MAX_TEXTS:
        raise InvalidRequest(
            f"inputs has {len(inputs)} texts, at most {MAX_TEXTS} can be in one list"
        )
    return [_parts(f"inputs.{i}" if listed else "inputs", entry) for i, entry in enumerate(inputs)]


def _parts(name: str, entry: Any) -> list[str]:
    if isinstance(entry, dict):
        for key in entry:
            if key not in PAIR:
                raise InvalidRequest(f"{name}.{key} is not known; known are {', '.join(PAIR)}")
        if "text" not in entry:
            raise InvalidRequest(f"{name}.text is missing, must be text")
        parts = [entry[key] for key in PAIR if entry.get(key) is not None]
    else:
        parts = [entry]
    for part in parts:
        if not isinstance(part, str):
            raise InvalidRequest(f'{name} must be text, or {{"text", "text_pair"}}')
        if not part.strip():
            raise InvalidRequest(f"{name} is empty, must be text")
        if "\0" in part:
            raise InvalidRequest(f"{name} holds NUL, which is no character of a text")
    return parts


def _csv_inputs(text: str) -> list[Any]:
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InvalidRequest(f"the body is no CSV: {error}") from None
    names = set(rows[0]) if rows else set()
    if "inputs" not in names and "text" not in names:
        raise InvalidRequest(
            "the body must be CSV with a header and a column inputs, or text and text_pair"
        )
    for i, row in enumerate(rows, 1):
        if None in row:
            raise InvalidRequest(
                f"row {i} of the CSV has more cells than the header: quote texts that have commas"
            )
    if "inputs" in names:
        return [row["inputs"] for row in rows]
    return [{name: row[name] for name in PAIR if row.get(name)} for row in rows]


def _to_csv(rows: Any) -> bytes:
    """Write a line for each label, with the number of its text in front."""
    lines = [{"input": i, **entry} for i, entries in enumerate(rows) for entry in entries]
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0] if lines else ["input"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().encode("utf-8", "backslashreplace")


def text_entries(
    parts: Sequence[str], result: Mapping[str, Any], about: Mapping[str, Any], options: Options
) -> list[dict[str, Any]]:
    """Return the labels or entities of a text; `result` and `about` are the engine's."""
    if about["of_tokens"]:
        return entities(parts[0], result, about["labels"], options)
    best = ranked(result["logits"][0], about["labels"], options.function or about["function"])
    return [{"label": label, "score": score} for label, score in best[: options.top_k]]


def format_answer(
    request: ClassifyRequest, entries: Sequence[list[dict[str, Any]]], about: Mapping[str, Any]
) -> Any:
    """Return the `text_entries` of each text in the form of the request; see the module."""
    # As transformers: a text alone has a list in any case, a pair and those of a list have not.
    lists = about["of_tokens"] or request.options.listed or request.form == "text"
    texts = entries if lists else [best for best, *_ in entries]
    return texts if request.form == "list" else texts[0]
