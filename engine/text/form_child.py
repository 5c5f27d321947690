"""The code of a form's process, which compiles one form and computes the masks of its answers.

llguidance computes them (1.9.1, https://github.com/guidance-ai/llguidance); this module gives it a
tokenizer's tokens as bytes, and keeps answers off branches that no token of the model can end.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest, cut
from common.form import Form, Kind
from engine.text.table import Table

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

# States of a form's lexer, 1 to 2 KB each. llguidance's own limit of 250,000 would be 400 MB.
MAX_LEXER_STATES = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols
# llguidance allows all tokens that match this pattern in one step where a form permits them: inside
# texts of limited length a mask takes 20 us instead of 300. Each further slice takes 6 MB.
PLAIN_TEXT = r'[^"\\\x00-\x1F\x7F]{1,10}'
MAX_FORCED = 256  # tokens of one call that a form prescribes; more come with the next call
MAX_REASON = 400  # characters of the library's message
UNWRITABLE = "none of the model's tokens can write"
# With `no_forcing`, the model still chooses which tokens write a text that the form prescribes.
OPTIONS = "%llguidance " + json.dumps({"no_forcing": True}) + "\n"
# JSON may have the spaces that json.dumps writes, or none. If more whitespace were allowed, a small
# model would go on with it until its length is used up.
WHITESPACE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}

# The search for branches that can be written. A state that allows more tokens than `MAX_BRANCHES`
# counts as one, and so does what is still open after `MAX_SEARCHED` masks of 40 us. The next
# `UNSEARCHED` tokens are not searched then, so that a long text costs a few masks a token.
MAX_BRANCHES = 64
MAX_SEARCHED = 128  # fewer than Python's limit of recursion
UNSEARCHED = 32
MAX_KNOWN = 10_000  # states of a form whose result is remembered
UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}  # the bytes that occur in texts

# Keywords of JSON Schema. If a schema has two of `COMBINING`, both apply to the same value.
COMBINING = {"properties", "$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"}
OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"}
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
VALUES = ("enum", "const", "default", "examples")
URIS = ("$ref", "$id", "$dynamicRef")
URI_CHARACTERS = "%:/?#[]@!$&'()*+,;=~"  # besides letters, digits and "_.-"

Result = TypeVar("Result")
_tokens: Tokens | None = None  # of the process that forks the processes of a tokenizer's forms


def prepare(table: dict[str, Any], stop_ids: list[int]) -> bool:
    """Prepare a tokenizer's tokens for the processes that are forked from this one."""
    global _tokens
    _tokens = Tokens(Table.from_json(table), stop_ids)
    return True


def serve(kind: Kind, source: list[str]) -> FormChild:
    """Compile a form. Raises `InvalidRequest`."""
    assert _tokens is not None
    return FormChild(_tokens, Form(kind, tuple(source)))


class Tokens:
    """A tokenizer's tokens as llguidance needs them: 17 MB and 80 ms with 51,200 tokens."""

    def __init__(self, table: Table, stop_ids: list[int]) -> None:
        self.table, self.stop_ids = table, frozenset(stop_ids)
        self.end = len(table)  # a further end token, which the model does not have
        pieces = list(table.pieces())
        self.opened = open_tokenizer(pieces, sorted(table.silent), [*stop_ids, self.end])
        texts = {piece for i, piece in enumerate(pieces) if i not in table.silent}
        self.write_all = all(bytes([byte]) in texts for byte in UTF8)


class FormChild:
    """Computes the masks of one form's answers."""

    def __init__(self, tokens: Tokens, form: Form) -> None:
        """Compile the form. Raises `InvalidRequest` if no answer can have it."""
        self._tokens, self._form = tokens, form
        self._lark = _guarded(form, _lark, form)
        self._compiled = _guarded(form, self._compile, tokens.opened)
        self._mask = np.zeros(tokens.end // 32 + 1, np.uint32)
        self._answers: dict[int, Answer] = {}
        self._known: dict[bytes, bool] = {}  # by what is written: whether it can be completed
        self._stuck = b""  # the longest text behind which no token can go on
        first = Answer(self._compiled.deep_copy(), b"")
        self._first = self._advance(first)
        if not self._first["forced"] and tokens.stop_ids.issuperset(map(int, self._allowed())):
            raise _refused(form, "allows only an answer without text")

    def _compile(self, tokenizer: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        matcher = LLMatcher(tokenizer, self._lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(self._form, matcher.get_error())
        return matcher

    def __call__(self, steps: list[tuple[int, int | None]], ended: list[int]) -> list[Any]:
        """Advance answers by a token each, and forget those that have ended.

        A step is an answer's number and its next token; None returns the state of a new answer. A
        state has the tokens that the form forces, and the mask behind them: the bits of the tokens
        that may come next, all 0 where the answer is complete. It has an error instead where the
        answer cannot go on.
        """
        for number in ended:
            self._answers.pop(number, None)
        return [self._step(number, token) for number, token in steps]

    def _step(self, number: int, token: int | None) -> dict[str, Any]:
        if token is None:
            return self._first
        answer = self._answers.get(number)
        if answer is None:
            answer = self._answers[number] = Answer(self._compiled.deep_copy(), b"")
            for forced in self._first["forced"]:
                answer.consume(forced, self._tokens.table)
        try:
            return _guarded(self._form, self._advance, answer, token)
        except InvalidRequest as error:
            return {"error": error.message}

    def _advance(self, answer: Answer, token: int | None = None) -> dict[str, Any]:
        """Advance an answer by a token and by those that it forces; return its state."""
        forced: list[int] = []
        while True:
            if token is not None and not answer.consume(token, self._tokens.table):
                raise _refused(self._form, answer.matcher.get_error())
            if answer.matcher.is_stopped() and not answer.matcher.is_error():
                self._mask[:] = 0
                break
            self._compute(answer)
            allowed = self._allowed()
            if len(allowed) != 1 or len(forced) == MAX_FORCED:
                break
            token = int(allowed[0])
            if token in self._tokens.stop_ids:
                break
            forced.append(token)
        mask = base64.b64encode(self._mask.tobytes()).decode() if self._mask.any() else ""
        return {"forced": forced, "mask": mask}

    def _compute(self, answer: Answer) -> None:
        """Compute the mask of an answer, without branches that no token can end."""
        if not self._fill(answer.matcher):
            self._stuck = answer.written
            raise self._unwritable(answer.matcher.get_error())
        if self._tokens.write_all:
            return
        if answer.unsearched:
            answer.unsearched -= 1
            return
        allowed = self._allowed()
        if 0 < len(allowed) <= MAX_BRANCHES:
            mask, self._stuck = self._mask.copy(), b""
            count = [MAX_SEARCHED]  # masks left
            for token in map(int, allowed):
                if token not in self._tokens.stop_ids and not self._ends(answer, token, count):
                    mask[token // 32] &= ~np.uint32(1 << token % 32)
            self._mask = mask
            answer.unsearched = 0 if count[0] > 0 else UNSEARCHED
            if not self._mask.any() and not answer.matcher.is_accepting():
                raise self._unwritable("")

    def _ends(self, answer: Answer, token: int, count: list[int]) -> bool:
        """Whether an answer that goes on with `token` can be completed, as far as is searched."""
        written = answer.written + self._tokens.table.piece(token)
        known = self._known.get(written)
        if known is not None or count[0] <= 0:
            return known is not False
        count[0] -= 1
        answer = Answer(answer.matcher.deep_copy(), answer.written)
        ends = answer.consume(token, self._tokens.table)
        if ends and not answer.matcher.is_accepting():
            ends = self._fill(answer.matcher)
            allowed = sorted(map(int, self._allowed()), key=self._length, reverse=True)
            if not ends and len(written) > len(self._stuck):
                self._stuck = written
            if ends and 0 < len(allowed) <= MAX_BRANCHES:
                for each in allowed:  # any() of a generator would be a second frame a level
                    ends = self._ends(answer, each, count)
                    if ends:
                        break
        if count[0] > 0:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[written] = ends
        return ends

    def _length(self, token: int) -> int:
        return len(self._tokens.table.piece(token))

    def _fill(self, matcher: LLMatcher) -> bool:
        """Write the next tokens of a matcher into the mask; returns whether there are any."""
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        end = self._tokens.end
        self._mask[end // 32] &= np.uint32((1 << end % 32) - 1)
        return not matcher.is_error()

    def _allowed(self) -> NDArray[np.intp]:
        """The tokens of the mask, at most `MAX_BRANCHES` + 1 of them."""
        words = np.flatnonzero(self._mask)[: MAX_BRANCHES + 1]
        bits = np.unpackbits(self._mask[words].view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits)[: MAX_BRANCHES + 1]
        return np.asarray(words[at // 32] * 32 + at % 32, np.intp)

    def _unwritable(self, message: str) -> InvalidRequest:
        """The error of an answer that no token can continue, with the text that none can write."""
        if message and not message.startswith("NoExtension"):
            return _refused(self._form, message)
        written = self._stuck.decode("utf-8", "replace").strip()
        behind = f" behind {cut(written, 100)!r}" if written else ""
        text = _guarded(self._form, self._next_text)
        return _refused(self._form, f"{UNWRITABLE} {text!r}{behind}")

    def _next_text(self) -> str:
        """A character that may follow `_stuck`, by a tokenizer that has all bytes."""
        tokenizer = open_tokenizer([bytes([byte]) for byte in range(256)], [], [256])
        matcher, mask = self._compile(tokenizer), np.zeros(9, np.uint32)
        matcher.consume_tokens(list(self._stuck))
        text = self._stuck[len(self._stuck.decode("utf-8", "ignore").encode()) :]
        while len(text) < 4:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.is_error() or not allowed.size or allowed[0] > 255:
                break
            matcher.consume_token(int(allowed[0]))
            text += bytes([int(allowed[0])])
            try:
                return text.decode()
            except UnicodeDecodeError:
                continue
        return text.decode("utf-8", "replace")


class Answer:
    """One answer's matcher, and the bytes that it has written."""

    def __init__(self, matcher: LLMatcher, written: bytes) -> None:
        self.matcher, self.written = matcher, written
        self.unsearched = 0  # tokens until the next search

    def consume(self, token: int, table: Table) -> bool:
        self.written += table.piece(token)
        return bool(self.matcher.consume_token(token))


class _Wrapped:
    """The attributes of a tokenizer that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: list[bytes], silent: list[int]) -> None:
        self.tokens, self.special_token_ids = [*pieces, b""], silent
        self.eos_token_id = len(pieces)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # called only for forced tokens, see OPTIONS


def open_tokenizer(pieces: list[bytes], silent: list[int], ends: list[int]) -> LLTokenizer:
    """Open llguidance's tokenizer of pieces; one more token, the last of `ends`, is added."""
    from llguidance import LLTokenizer

    tokens = cast("TokenizerWrapper", _Wrapped(pieces, silent))
    return LLTokenizer(tokens, n_vocab=len(pieces) + 1, eos_token=ends, slices=[PLAIN_TEXT])


def _guarded(form: Form, work: Callable[..., Result], *arguments: Any) -> Result:
    """Turn whatever the library raises, panics of its Rust code included, into `InvalidRequest`."""
    try:
        return work(*arguments)
    except (InvalidRequest, MemoryError):
        raise
    except BaseException:  # PanicException is no Exception
        raise _refused(form, "panicked") from None


def _refused(form: Form, message: str) -> InvalidRequest:
    if "panic" in message or "backtrace" in message:  # with paths and a native backtrace
        message = "llguidance cannot read it"
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
                _encode_uris(schema)
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


def _encode_uris(schema: Any) -> None:
    """Percent-encode references, which JSON Schema has as URIs and people write in Hangul."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for name, value in each.items():
                if name in URIS and isinstance(value, str):
                    each[name] = quote(value, URI_CHARACTERS)
                elif name not in VALUES:
                    waiting.append(value)
        elif isinstance(each, list):
            waiting += each


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
