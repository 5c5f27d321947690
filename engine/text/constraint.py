"""Constrained decoding: which tokens may come next where an answer is held to a form.

llguidance computes the sets (1.9.1, https://github.com/guidance-ai/llguidance); this module gives
it a tokenizer's tokens as bytes, and bounds for what a form may cost.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest, cut
from common.form import Form
from engine.native import library
from engine.text.table import PROCESS, Table

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

Logits = NDArray[np.float32]
# Logits and tokens (V,) that a tokenizer's constraints return, reused on the engine's thread.
Buffers = tuple[Logits, NDArray[np.int32]]

MAX_COMPILED = 64  # compiled forms of one tokenizer: some 10 KB to 1 MB each
# States of a form's lexer, 1 to 2 KB each. llguidance's own limit of 250,000 would be 400 MB.
MAX_LEXER_STATES = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols
# llguidance allows all tokens that match this pattern in one step where a form permits them: inside
# texts of limited length a mask takes 20 us instead of 300. Each further slice takes 6 MB.
PLAIN_TEXT = r'[^"\\\x00-\x1F\x7F]{1,10}'
MAX_REASON = 400  # characters of the library's message
# With `no_forcing`, the model still chooses which tokens write a text that the form prescribes.
OPTIONS = "%llguidance " + json.dumps({"no_forcing": True}) + "\n"
# JSON may have the spaces that json.dumps writes, or none. If more whitespace were allowed, a small
# model would go on with it until its length is used up.
WHITESPACE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}

# Keywords of JSON Schema. If a schema has two of `COMBINING`, both apply to the same value.
COMBINING = {"properties", "$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"}
OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"}
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")


class Vocabulary:
    """A tokenizer's tokens as constraints need them, shared by its models. Thread-safe.

    Costs nothing before the first form, then 17 MB and 80 ms with 51,200 tokens.
    """

    def __init__(self, table: Table, stop_ids: Iterable[int]) -> None:
        self._table, self._stop_ids = table, sorted(stop_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._buffers: Buffers
        self._compiled: OrderedDict[Form, LLMatcher] = OrderedDict()

    def constrain(self, form: Form) -> Constraint:
        """Return the constraint of a new answer. Raises `InvalidRequest` for an unusable form."""
        if self._table.kind == PROCESS:
            raise InvalidRequest(
                f"parameters.{form.kind}: this model's tokenizer cannot be held to a form: its"
                " texts are not those of its tokens, joined"
            )
        with self._lock:
            matcher = self._compiled.get(form)
            if matcher is None:
                matcher = self._compile(form)
                self._compiled[form] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(form)
            return Constraint(form, matcher.deep_copy(), self._buffers)

    def _compile(self, form: Form) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._open(), _lark(form), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(form, matcher.get_error())
        first = Constraint(form, matcher.deep_copy(), self._buffers)
        if first.complete or first.forced in self._stop_ids:
            raise InvalidRequest(f"parameters.{form.kind}: allows only an answer without text")
        return matcher

    def _open(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            end = len(self._table)  # a further end token, which the model does not have
            self._buffers = np.empty(end, np.float32), np.empty(end, np.int32)
            tokens = cast("TokenizerWrapper", _Tokens(self._table))
            self._tokenizer = LLTokenizer(
                tokens, n_vocab=end + 1, eos_token=[*self._stop_ids, end], slices=[PLAIN_TEXT]
            )
        return self._tokenizer


class _Tokens:
    """The attributes of a tokenizer that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: Table) -> None:
        self.tokens = [*table.pieces(), b""]
        self.special_token_ids = sorted(table.silent)
        self.eos_token_id = len(table)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # called only for forced tokens, see OPTIONS


class Constraint:
    """The tokens that may come next in one answer with a form. Computing a mask takes 30 us."""

    def __init__(self, form: Form, matcher: LLMatcher, buffers: Buffers) -> None:
        self._form, self._matcher, self._buffers = form, matcher, buffers
        self._count = len(buffers[0])
        self._mask = np.zeros(self._count // 32 + 1, np.uint32)
        self._address = self._mask.ctypes.data
        self._stopped = bool(matcher.is_stopped())
        self._compute_mask()

    @property
    def complete(self) -> bool:
        """Whether the answer can only end here."""
        return self._stopped or self._only == -1

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None if there is not exactly one."""
        return self._only if self._only >= 0 else None

    def likeliest(self, logits: Logits) -> int:
        """The token with the largest of `logits` (V,) among those that may come next."""
        logits = np.ascontiguousarray(logits)
        return int(library.allowed_argmax(logits.ctypes.data, self._address, self._count))

    def allowed(self, logits: Logits) -> tuple[Logits, NDArray[np.int32]]:
        """The logits of tokens that may come next, and the tokens; valid until the next call."""
        logits = np.ascontiguousarray(logits)
        values, tokens = self._buffers
        count = library.allowed_logits(
            logits.ctypes.data, self._address, self._count, values.ctypes.data, tokens.ctypes.data
        )
        return values[:count], tokens[:count]

    def advance(self, token: int) -> None:
        """Advance by an allowed token. Raises `InvalidRequest` where the form cannot go on."""
        if not self._matcher.consume_token(token):
            raise _refused(self._form, self._matcher.get_error())
        self._stopped = bool(self._matcher.is_stopped())
        if not self._stopped:
            self._compute_mask()

    def _compute_mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        if self._matcher.is_error():
            raise _refused(self._form, self._matcher.get_error())
        # `only_allowed` clears the bit of the further end token, which the model does not have.
        self._only: int = library.only_allowed(self._address, self._count)


def _refused(form: Form, message: str) -> InvalidRequest:
    if message.startswith("NoExtension"):
        message = "none of the model's tokens can continue the answer"
    reason = " ".join(message.replace("<non-verbose/>", "").split()) or "it is too complex"
    return InvalidRequest(f"parameters.{form.kind}: {cut(reason, MAX_REASON)}")


def begins_with_space(form: Form) -> bool:
    """Whether an answer may begin with a space that is no part of it, as words do in a text."""
    if form.kind == "choice":
        return not any(text[0].isspace() for text in form.source)
    return form.kind == "json_schema"


def _lark(form: Form) -> str:
    """A form as a grammar of llguidance's, https://github.com/guidance-ai/llguidance/blob/main/docs."""
    space = '" "? ' if begins_with_space(form) else ""
    match form.kind:
        case "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.source)
            return f"{OPTIONS}start: CHOICE\nCHOICE: {space}({texts})"
        case "regex":
            from llguidance import regex_to_lark

            return f"{OPTIONS}start: /{regex_to_lark(form.source[0], use_ascii='d')}/"
        case "json_schema":
            schema: Any = json.loads(form.source[0])
            if isinstance(schema, dict):
                _close(schema)
                own = schema.get("x-guidance")
                schema["x-guidance"] = {**WHITESPACE, **(own if isinstance(own, dict) else {})}
            return f"{OPTIONS}start: {space}%json {json.dumps(schema, ensure_ascii=False)}"
        case "grammar":
            return OPTIONS + _grammar(form)


def _close(schema: dict[str, Any]) -> None:
    """Forbid properties that a schema does not name, unless it allows others explicitly.

    JSON Schema allows other properties by default. A small model goes on with them until its length
    is used up, and other servers do not write them. Combined schemas, such as those of an allOf,
    are not changed: a property that one of them does not name may be named by another.
    """
    schemas = list(_schemas(schema))
    for each in schemas:
        all_of = each.get("allOf")
        if len(COMBINING & each.keys()) > 1 or (isinstance(all_of, list) and len(all_of) > 1):
            return
    for each in schemas:
        if isinstance(each.get("properties"), dict) and not OPEN & each.keys():
            required = each.get("required")
            names = required if isinstance(required, list) else []
            if all(isinstance(name, str) and name in each["properties"] for name in names):
                each["additionalProperties"] = False


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside it."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            for name, value in each.items():
                if name in MAPS_OF_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif name in LISTS_OF_SCHEMAS and isinstance(value, list):
                    waiting += value
                elif name in ("items", "additionalProperties"):
                    waiting.append(value)


def _grammar(form: Form) -> str:
    """Return a grammar, written in GBNF or Lark's syntax, in Lark's syntax without options."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        text = any_to_lark(form.source[0]).lstrip()
        if text.startswith("%llguidance"):
            text = text.removeprefix("%llguidance").lstrip()
            _, end = json.JSONDecoder().raw_decode(text)
            text = text[end:]
    except Exception as error:  # the converter's own errors, and RecursionError
        raise _refused(form, f"cannot be read: {error}") from None
    return text
