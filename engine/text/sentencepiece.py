"""Text to token ids and back: what any tokenizer does, and KoGPT2 v1's, a sentencepiece model."""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from common.errors import ArtifactError, InvalidRequest
from engine.artifacts.generation_config import Part

SPACE = "\u2581"  # sentencepiece's mark of a space


class Detokenizer(Protocol):
    """Turns a sequence's ids into text one by one, for a stream."""

    def feed(self, token: int) -> str:
        """The text that `token` completes, often all of its own, sometimes none."""

    def flush(self) -> str:
        """What is left of a character cut short, as U+FFFD."""


class Tokenizer(Protocol):
    vocab_size: int  # without what was added beside the model's own vocabulary
    eos_id: int | None
    special_ids: set[int]  # of tokens that are no text, such as `<s>`

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """By transformers' name of what they are for, such as `eos_token`."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer puts in front. Raises `InvalidRequest`."""

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """The ids of a filled template, of nothing else. Control tokens are such only in the
        template's own text. Raises `InvalidRequest` where a field holds one."""

    def check_plain(self, text: str) -> None:
        """Raises `InvalidRequest` for a text with a control token in it."""

    def token_id(self, token: str) -> int | None: ...

    def piece(self, token: int) -> bytes:
        """A token alone as it stands in a text, perhaps a part of a character; a control token by
        its name."""

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """For the ids that follow `prompt`."""


def check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("inputs holds half a surrogate pair, which is no character") from None


def control_in_text(token: str) -> InvalidRequest:
    return InvalidRequest(f"inputs holds {token}, which this model's template keeps for itself")


class SentencePieceTokenizer:
    """The tokenizer of KoGPT2 v1: a sentencepiece model, always its best (deterministic) pieces."""

    def __init__(self, path: Path) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ArtifactError(f"{path.name} is not a sentencepiece model: {error}") from None
        size = self._model.get_piece_size()
        self.vocab_size: int = size
        ids = list(range(size))  # asked for in one call each: there may be 50,000
        self._pieces: list[str] = self._model.id_to_piece(ids)
        self.special_ids = set(itertools.compress(ids, self._model.is_control(ids)))
        byte_ids = itertools.compress(ids, self._model.is_byte(ids))
        self._bytes = {i: int(self._pieces[i][3:-1], 16) for i in byte_ids}
        self.bos_id = self.token_id("<s>")
        self.eos_id = self.token_id("</s>")
        names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
        self.special_tokens = {
            f"{part}_token": name for part, name in names.items() if self.token_id(name) is not None
        }

    def token_id(self, token: str) -> int | None:
        found: int = self._model.piece_to_id(token)
        return found if self._pieces[found] == token else None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, `<s>` first where the vocabulary has one.

        Raises `InvalidRequest` for text that is not Unicode.
        """
        ids = self._encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def _encode(self, text: str) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """As the chat fine-tunes of v1 were trained: what lies between two control tokens is cut
        into pieces alone, the control pieces stand for themselves."""
        controls, pattern = self._controls
        ids: list[int] = []
        text = ""

        def cut() -> None:
            found = self._encode(text)
            for token in found:
                if token in controls:
                    raise control_in_text(self._pieces[token])
            ids.extend(found)

        for part in parts:
            pieces = [part.text] if part.is_field or pattern is None else pattern.split(part.text)
            for i, piece in enumerate(pieces):
                if i % 2:  # the pattern's own
                    cut()
                    ids.append(self._model.piece_to_id(piece))
                    text = ""
                else:
                    text += piece
        cut()
        return ids

    def check_plain(self, text: str) -> None:
        check_unicode(text)
        _, pattern = self._controls
        found = pattern and pattern.search(text)
        if found:
            raise control_in_text(found[0])

    @functools.cached_property
    def _controls(self) -> tuple[set[int], re.Pattern[str] | None]:
        """The ids that are no text, control pieces and user-defined symbols, and what finds them.

        Those are matched wherever they stand in a text.
        """
        from sentencepiece import sentencepiece_model_pb2 as protobuf

        model: Any = protobuf.ModelProto.FromString(  # type: ignore[attr-defined]
            self._model.serialized_model_proto()
        )
        symbol = model.SentencePiece.USER_DEFINED
        ids = self.special_ids | {i for i, p in enumerate(model.pieces) if p.type == symbol}
        names = sorted((self._pieces[i] for i in ids), key=len, reverse=True)
        return ids, re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def piece(self, token: int) -> bytes:
        if token in self._bytes:
            return bytes([self._bytes[token]])
        if token >= len(self._pieces):
            return b""
        return self._pieces[token].replace(SPACE, " ").encode()

    def detokenizer(self, prompt: Sequence[int] = ()) -> PieceDetokenizer:
        return PieceDetokenizer(self._pieces, self._bytes, self.special_ids)


class PieceDetokenizer:
    """A piece is its text with U+2581 as a space, as in the guides' loop; control pieces are
    silent; byte pieces are held back until they make whole characters."""

    def __init__(self, pieces: list[str], byte_pieces: dict[int, int], silent: set[int]) -> None:
        self._pieces, self._bytes, self._silent = pieces, byte_pieces, silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._bytes:
            return self._utf8.decode(bytes([self._bytes[token]]))
        text = self.flush()
        if token in self._silent or token >= len(self._pieces):
            return text
        return text + self._pieces[token].replace(SPACE, " ")

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
