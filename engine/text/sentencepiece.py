"""KoGPT2 v1's tokenizer, a sentencepiece model."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from common.errors import ArtifactError, InvalidRequest
from engine.artifacts.generation_config import Part
from engine.text.files import Files, read_files
from engine.text.table import SEPARATE, Table

SPACE = "\u2581"  # sentencepiece's mark of a space


def check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("inputs holds half a surrogate pair, which is no character") from None


def control_in_text(token: str) -> InvalidRequest:
    return InvalidRequest(f"inputs holds {token}, which is reserved for this model's template")


class SentencePieceTokenizer:
    """The tokenizer of KoGPT2 v1: a sentencepiece model, without sampling."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        content = (files or read_files(path))[path.name]
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except (RuntimeError, OSError) as error:
            raise ArtifactError(f"{path.name} is not a sentencepiece model: {error}") from None
        size = self._model.get_piece_size()
        self.vocab_size: int = size  # without what was added beside the model's own vocabulary
        ids = list(range(size))  # passed in one call: there may be 50,000
        self._pieces: list[str] = self._model.id_to_piece(ids)
        # Ids of tokens that are no text, such as `<s>`.
        self.special_ids = set(itertools.compress(ids, self._model.is_control(ids)))
        byte_ids = itertools.compress(ids, self._model.is_byte(ids))
        self._bytes = {i: int(self._pieces[i][3:-1], 16) for i in byte_ids}
        self.bos_id = self.token_id("<s>")
        self.eos_id = self.token_id("</s>")
        names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
        # Special tokens by their names in transformers, such as `bos_token`.
        self.special_tokens = {
            f"{part}_token": name for part, name in names.items() if self.token_id(name) is not None
        }

    def token_id(self, token: str) -> int | None:
        token_id: int = self._model.piece_to_id(token)
        return token_id if self._pieces[token_id] == token else None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, `<s>` first if the vocabulary has it. Raises `InvalidRequest`."""
        ids = self._encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def _encode(self, text: str) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids

    def encode_text(self, parts: Sequence[str], most: int | None, offsets: bool) -> list[list[int]]:
        """Return the ids of a text, at most `most`. Raises `InvalidRequest` for what v1 lacks."""
        if len(parts) != 1 or offsets:
            raise InvalidRequest(
                "this model's tokenizer (.spiece) takes no pairs and has no places of tokens: it"
                " needs a tokenizer.json"
            )
        return [self.encode(parts[0])[:most]]

    def cut(self, text: str, most: int) -> str:
        """Shorten a text to `most` characters."""
        return text[:most]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Return the ids of a filled template, as chat fine-tunes of v1 were trained.

        The text between two control tokens is tokenized on its own; a control piece becomes its
        own id.
        """
        controls, pattern = self._controls
        ids: list[int] = []
        text = ""

        def cut() -> None:
            new = self._encode(text)
            for token in new:
                if token in controls:
                    raise control_in_text(self._pieces[token])
            ids.extend(new)

        for part in parts:
            pieces = [part.text] if part.is_field or pattern is None else pattern.split(part.text)
            for i, piece in enumerate(pieces):
                if i % 2:  # a control piece, which the pattern captures
                    cut()
                    ids.append(self._model.piece_to_id(piece))
                    text = ""
                else:
                    text += piece
        cut()
        return ids

    def check_plain(self, text: str) -> None:
        """Raise `InvalidRequest` for a text with a control token in it."""
        check_unicode(text)
        _, pattern = self._controls
        match = pattern and pattern.search(text)
        if match:
            raise control_in_text(match[0])

    @functools.cached_property
    def _controls(self) -> tuple[set[int], re.Pattern[str] | None]:
        """Ids of control pieces and user-defined symbols, and a pattern that finds them in text."""
        from sentencepiece import sentencepiece_model_pb2 as protobuf

        model: Any = protobuf.ModelProto.FromString(  # type: ignore[attr-defined]
            self._model.serialized_model_proto()
        )
        symbol = model.SentencePiece.USER_DEFINED
        ids = self.special_ids | {i for i, p in enumerate(model.pieces) if p.type == symbol}
        names = sorted((self._pieces[i] for i in ids), key=len, reverse=True)
        return ids, re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def table(self, size: int) -> Table:
        """Return the table of all ids; `size`, of a model's vocabulary, is never smaller."""
        return self._table

    @functools.cached_property
    def _table(self) -> Table:
        pieces = [piece.replace(SPACE, " ").encode() for piece in self._pieces]
        for i, byte in self._bytes.items():
            pieces[i] = bytes([byte])
        return Table(SEPARATE, pieces, self.special_ids, self._bytes)

    def decode(self, ids: list[int]) -> tuple[str, int, str]:
        """Decode ids, see `engine.text.table.Decode`."""
        text = self._table.text(ids)
        return text, 0, text
