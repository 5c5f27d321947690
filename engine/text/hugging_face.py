"""`tokenizer.json`: any tokenizer of Hugging Face's `tokenizers`, as transformers would use it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from common.errors import ArtifactError
from engine.artifacts.generation_config import Part
from engine.text.files import CONFIG, SPECIAL_TOKENS, Files, json_in, read_files
from engine.text.sentencepiece import SPACE, check_unicode, control_in_text
from engine.text.table import ALL_SPACES, BYTES, PROCESS, RUNS, Table

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
# Texts that a table is checked with, in addition to all ids in order and short random runs.
TEXTS = ("가", "나는 오늘  밥을", " Hello, 1!", "뷁\n漢🙂é", "<s> 👩‍👩‍👧 ㅋㅋ")
RUNS_CHECKED = 200
MAX_IDS = 1 << 30  # no limit


class HuggingFaceTokenizer:
    """A tokenizer from `tokenizer.json` that encodes and decodes as transformers does.

    `tokenizer_config.json` and `special_tokens_map.json` beside `path` are used, too. `files` has
    the content of these files, if it is already read. Raises `ArtifactError` for unusable files.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        files = files or read_files(path)
        try:
            self._tokenizer = FastTokenizer.from_buffer(files[path.name])
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise ArtifactError(f"{path.name} is not a tokenizer: {error}") from None
        # Truncation, padding and dropout are for training; prompts must not depend on them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        config = json_in(files, CONFIG)
        # As in transformers 5, the older file is used only if the newer one has no such list.
        named = dict(config)
        if "added_tokens_decoder" not in config:
            named |= json_in(files, SPECIAL_TOKENS)
        # Then `<s>` in a text is text, in a chat template's, too, as in transformers.
        self._tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        # As `truncation=True` shortens a text in transformers.
        self._side = "left" if config.get("truncation_side") == "left" else "right"
        longest = config.get("model_max_length")
        self._max_length = longest if type(longest) is int and longest > 0 else MAX_IDS
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self._add_tokens(named)
        tokens = {name: _added_token(named.get(name)) for name in NAMED}
        self.special_tokens = {n: str(t.content) for n, t in tokens.items() if t is not None}
        self.eos_id = self.token_id(self.special_tokens.get("eos_token", ""))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special}
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self.token_id(unknown)  # any rare character
        decoder = repr(self._tokenizer.decoder)
        self._letters = byte_letters() if "ByteLevel" in decoder else {}
        names = [f"<0x{byte:02X}>" for byte in range(256)] if "ByteFallback" in decoder else []
        byte_ids = {self.token_id(name): byte for byte, name in enumerate(names)}
        self._byte_ids = {i: byte for i, byte in byte_ids.items() if i is not None}
        # Some files list `<0x0A>` as special; it is the newline of any text.
        self.special_ids = self._special - {self._unknown} - self._byte_ids.keys()

    def _add_tokens(self, named: dict[str, Any]) -> None:
        """Add tokens that the other files list and `tokenizer.json` lacks or defines otherwise."""
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
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """Return transformers' `tokenizer(text).input_ids`; `add_bos_token` is ignored."""
        return self._encode(text, True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_text(self, parts: Sequence[str], most: int | None, offsets: bool) -> list[list[int]]:
        """Return the ids of a text or a pair of texts as transformers' tokenizer does.

        With `most`, the longer text is truncated so that all has at most so many ids. With
        `offsets`, also where each token begins and ends in the text, and 1 for special tokens.
        """
        for part in parts:
            check_unicode(part)
        if most is not None:
            most = min(most, self._max_length)
            self._tokenizer.enable_truncation(most, direction=self._side)
        try:
            encoding = self._tokenizer.encode(parts[0], parts[1] if len(parts) > 1 else None)
        finally:
            self._tokenizer.no_truncation()
        if not offsets:
            return [encoding.ids]
        begins, ends = ([place[i] for place in encoding.offsets] for i in (0, 1))
        return [encoding.ids, begins, ends, encoding.special_tokens_mask]

    def cut(self, text: str, most: int) -> str:
        """Shorten a text to `most` characters, on the side where the tokenizer truncates."""
        return text[:most] if self._side == "right" else text[-most:]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Encode a filled template. Raises `InvalidRequest` if a field adds a control token."""
        ids = self._encode("".join(part.text for part in parts), False)
        frame = self._encode("".join(part.text for part in parts if not part.is_field), False)
        plain = {self._unknown, *self._byte_ids}
        wanted = [i for i in frame if i in self._added and i not in plain]
        controls = self.special_ids.union(wanted)
        for token in (i for i in ids if i in controls):
            if not wanted or wanted[0] != token:
                raise control_in_text(self._added[token])
            wanted.pop(0)
        return ids

    def check_plain(self, text: str) -> None:
        for token in (i for i in self._encode(text, False) if i in self.special_ids):
            raise control_in_text(self._added[token])

    def table(self, size: int) -> Table:
        """Return the table of the ids below `size`, of kind `PROCESS` if joining pieces fails."""
        ids = range(size)
        names = [self._tokenizer.id_to_token(i) for i in ids]
        silent = {i for i in ids if i in self._special or names[i] is None}
        kind = BYTES if self._letters else RUNS
        plain = [i for i in ids if i not in silent and i not in self._byte_ids]
        whole = self._decode(plain).lstrip(" ")
        for pieces_of in (self._simple_pieces, self._decoded_pieces):
            pieces = pieces_of(names)
            joined = b"".join(pieces[i] for i in plain).decode("utf-8", "replace")
            if joined.lstrip(" ") == whole:
                samples = self._samples(pieces)
                for lead in (0, ALL_SPACES, 1) if kind == RUNS else (0,):
                    table = Table(kind, pieces, silent, self._byte_ids, lead)
                    if all(table.text(sample) == self._decode(sample) for sample in samples):
                        return table
        return Table(PROCESS, pieces, silent, self._byte_ids)

    def _simple_pieces(self, names: list[str | None]) -> list[bytes]:
        """Return the piece of each id, derived from its name as most decoders do."""
        letters = str.maketrans({letter: chr(byte) for letter, byte in self._letters.items()})
        pieces = []
        for i, name in enumerate(names):
            if i in self._added or name is None:
                pieces.append((name or "").encode())
            elif i in self._byte_ids:
                pieces.append(bytes([self._byte_ids[i]]))
            elif self._letters:
                pieces.append(name.translate(letters).encode("latin-1", "ignore"))
            else:
                pieces.append(name.replace(SPACE, " ").encode())
        return pieces

    def _decoded_pieces(self, names: list[str | None]) -> list[bytes]:
        """Return the piece of each id as the library decodes it after another token.

        A decoder may drop the space in front of the first token of a text.
        """
        pieces = self._simple_pieces(names)
        odd = {*self._added, *self._byte_ids} if not self._letters else range(len(names))
        plain = [i for i in range(len(names)) if i not in odd and names[i] is not None]
        decode = self._tokenizer.decode
        # The token in front is doubled: a decoder may treat the last token of a text differently.
        some = next(([i, i] for i in plain if decode([i]).strip()), [])
        texts = self._tokenizer.decode_batch([[*some, i] for i in plain])
        for i, text in zip(plain, texts, strict=True):
            pieces[i] = text[len(decode(some)) :].encode("utf-8", "replace")
        return pieces

    def _samples(self, pieces: list[bytes]) -> list[list[int]]:
        """Return ids that test how pieces are joined: at the start, in byte runs, at random."""
        rng = random.Random(0)  # noqa: S311
        ids, byte_ids = range(len(pieces)), [i for i in self._byte_ids if i < len(pieces)]
        samples = [self._encode(text, False) for text in TEXTS]
        samples += [rng.choices(ids, k=rng.randrange(1, 9)) for _ in range(RUNS_CHECKED)]
        samples += [rng.choices(ids, k=3) + byte_ids[i : i + 2] for i in range(len(byte_ids))]
        spaces = {i: len(p) - len(p.lstrip(b" ")) for i, p in enumerate(pieces) if p[:1] == b" "}
        most = sorted(spaces, key=lambda i: -spaces[i])[:RUNS_CHECKED]
        alone = [[i] for i in spaces if spaces[i] == len(pieces[i])][:4]
        return samples + [[*front, i] for i in most for front in ([], *alone)]

    def decode(self, ids: list[int]) -> tuple[str, int, str]:
        """Decode ids, see `engine.text.table.Decode`; the last ids begin outside runs of bytes."""
        text = self._decode(ids)
        for begin in range(len(ids) - 1, 0, -1):
            odd = ids[begin] in self._byte_ids or ids[begin] in self._special
            if not odd and (last := self._decode(ids[begin:])):
                return text, begin, last
        return text, 0, text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def byte_letters() -> dict[str, int]:
    """Map the letters that GPT-2 writes for bytes (Latin-1 or from U+0100 on) to the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _added_token(value: Any) -> AddedToken | None:
    """Return the token that a JSON text or object describes; None for other values."""
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
