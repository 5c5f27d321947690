"""`tokenizer.json`: any tokenizer of Hugging Face's `tokenizers`, as transformers would use it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from common.errors import ArtifactError
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import Part
from engine.text.sentencepiece import check_unicode, control_in_text

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
CONFIG = "tokenizer_config.json"
REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class HuggingFaceTokenizer:
    """Text to ids and back as transformers does it, with `tokenizer_config.json` and
    `special_tokens_map.json` beside `path`, if they are there.

    Raises `ArtifactError`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # Exception itself; and a panic in Rust is not even one
            raise ArtifactError(f"{path.name} is not a tokenizer: {error}") from None
        # Settings of the last training run, of which a prompt must know nothing.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        said = read_json(path.with_name(CONFIG))
        # As transformers 5 has it: the older file counts where the newer one lists no tokens.
        named = dict(said)
        if "added_tokens_decoder" not in said:
            named |= read_json(path.with_name("special_tokens_map.json"))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self._add_tokens(named)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        tokens = {name: _added_token(named.get(name)) for name in NAMED}
        self.special_tokens = {n: str(t.content) for n, t in tokens.items() if t is not None}
        self.eos_id = self.token_id(self.special_tokens.get("eos_token", ""))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special}
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self.token_id(unknown)  # any rare character
        self.special_ids = self._special - {self._unknown}
        falls_back = '"ByteFallback"' in self._tokenizer.to_str()
        self._letters = byte_letters() if "ByteLevel" in repr(self._tokenizer.decoder) else {}
        self._byte_ids = {
            i for token, i in vocabulary.items() if falls_back and BYTE_TOKEN.fullmatch(token)
        }

    def _add_tokens(self, named: dict[str, Any]) -> None:
        """Tokens that are special only because a file beside `tokenizer.json` says so."""
        decoder = named.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise ArtifactError(f"{CONFIG}: added_tokens_decoder must be an object, tokens by id")
        known = {str(t.content): t for t in self._tokenizer.get_added_tokens_decoder().values()}
        new = []
        for _, entry in sorted(decoder.items(), key=lambda item: _number(item[0])):
            token = _added_token(entry)
            if token is not None and repr(known.get(token.content)) != repr(token):
                new.append(token)
        names = {token.content for token in new} | set(known)
        values = [named.get(name) for name in NAMED]
        for name in LISTED:
            listed = named.get(name) or []
            if not isinstance(listed, list | dict):
                raise ArtifactError(f"{CONFIG}: {name} must be a list of tokens, or an object")
            values += list(listed.values()) if isinstance(listed, dict) else list(listed)
        for value in values:
            token = _added_token(value)
            if token is not None and token.content not in names:
                names.add(token.content)
                new.append(token)
        self._tokenizer.add_tokens(new)

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """As transformers' `tokenizer(text).input_ids`: what is put in front and behind is said in
        tokenizer.json, whatever `add_bos_token` says beside it."""
        return self._encode(text, True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """The filled template as one text, whose tokens must be those that the template has when
        its fields are empty."""
        ids = self._encode("".join(part.text for part in parts), False)
        frame = self._encode("".join(part.text for part in parts if not part.is_field), False)
        wanted = [i for i in frame if i in self._added and i != self._unknown]
        kept = self.special_ids.union(wanted)
        for found in (i for i in ids if i in kept):
            if not wanted or wanted[0] != found:
                raise control_in_text(self._added[found])
            wanted.pop(0)
        return ids

    def check_plain(self, text: str) -> None:
        for found in (i for i in self._encode(text, False) if i in self.special_ids):
            raise control_in_text(self._added[found])

    def piece(self, token: int) -> bytes:
        name: str | None = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return name.encode()
        if token in self._byte_ids:
            return bytes([int(name[3:-1], 16)])
        if self._letters:
            return bytes(self._letters[letter] for letter in name if letter in self._letters)
        # Behind another: a decoder may cut the space in front of a text's first token.
        decode, some = self._tokenizer.decode, self._some
        return decode([*some, token])[len(decode(some)) :].encode("utf-8", "replace")

    @functools.cached_property
    def _some(self) -> list[int]:
        """A token of text, twice: a decoder may show the last one otherwise."""
        odd = {*self._added, *self._byte_ids}
        plain = (i for i in range(self.vocab_size) if i not in odd)
        return next(([i, i] for i in plain if self._tokenizer.decode([i]).strip()), [])

    def detokenizer(self, prompt: Sequence[int]) -> WindowDetokenizer:
        return WindowDetokenizer(self._tokenizer, prompt, self._byte_ids, self._special)


class WindowDetokenizer:
    """The text of some last tokens with and without the new one: what one token adds depends on
    those before it (a leading space, half a character).

    All that it gives is what decoding prompt and new ids at once, without the special tokens, has
    more than decoding the prompt. Held back are characters that may not be whole.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        prompt: Sequence[int],
        byte_ids: set[int],
        silent: set[int],
    ) -> None:
        self._tokenizer, self._byte_ids, self._silent = tokenizer, byte_ids, silent
        self._in_bytes = False  # a run of byte tokens is decoded as a whole, or not at all
        self._window = list(prompt)
        self._given = ""  # the text of the window that was given, or was the prompt's
        self._shrink()

    def feed(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if token not in self._silent and self._tokenizer.id_to_token(token) is not None:
            self._in_bytes = token in self._byte_ids
        if text.endswith(REPLACEMENT) or self._in_bytes:
            return ""
        new = text[len(self._given) :]
        self._shrink()
        return new

    def flush(self) -> str:
        new = self._decode(self._window)[len(self._given) :]
        self._shrink()
        return new

    def _shrink(self) -> None:
        """Keeps the last tokens, as many as make some text, and no part of a run of bytes."""
        for begin in range(len(self._window) - 1, 0, -1):
            if self._window[begin] in self._byte_ids or self._window[begin] in self._silent:
                continue
            text = self._decode(self._window[begin:])
            if text:
                self._window, self._given = self._window[begin:], text
                return
        self._given = self._decode(self._window)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def byte_letters() -> dict[str, int]:
    """How GPT-2 writes bytes in its vocabulary: printable ones of Latin-1 as themselves, the
    others as the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _added_token(value: Any) -> AddedToken | None:
    """A token as the files write it: its text, or an object."""
    if isinstance(value, str) and value:
        return AddedToken(_unicode(value), special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    given = {name: value[name] for name in flags if isinstance(value.get(name), bool)}
    given.setdefault("special", True)
    return AddedToken(_unicode(value["content"]), **given)


def _unicode(token: str) -> str:
    try:
        token.encode("utf-8")
    except UnicodeEncodeError:
        message = f"{CONFIG}: the token {token!a} holds half a surrogate pair, which is no text"
        raise ArtifactError(message) from None
    return token


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else -1
