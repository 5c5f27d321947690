"""Text to token ids and back."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path

import sentencepiece

from engine.errors import ArtifactError, InvalidRequest

SPACE = "\u2581"  # sentencepiece's mark of a space


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
        self._silent = set(itertools.compress(ids, self._model.is_control(ids)))
        byte_ids = itertools.compress(ids, self._model.is_byte(ids))
        self._bytes = {i: int(self._pieces[i][3:-1], 16) for i in byte_ids}
        self.longest_piece = max(map(len, self._pieces), default=1)
        self.bos_id = self._id("<s>")
        self.eos_id = self._id("</s>")

    def _id(self, piece: str) -> int | None:
        found: int = self._model.piece_to_id(piece)
        return found if self._pieces[found] == piece else None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, `<s>` first where the vocabulary has one.

        Raises `InvalidRequest` for text that is not Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            message = "inputs holds half a surrogate pair, which is no character"
            raise InvalidRequest(message) from None
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._pieces, self._bytes, self._silent)


class Detokenizer:
    """Turns a sequence's ids into text one by one, for a stream.

    A piece is its text with U+2581 as a space, as in the guides' loop; control pieces are silent;
    byte pieces are held back until they make whole characters.
    """

    def __init__(self, pieces: list[str], byte_pieces: dict[int, int], silent: set[int]) -> None:
        self._pieces, self._bytes, self._silent = pieces, byte_pieces, silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes, often all of its own, sometimes none."""
        if token in self._bytes:
            return self._utf8.decode(bytes([self._bytes[token]]))
        text = self.flush()
        if token in self._silent or token >= len(self._pieces):
            return text
        return text + self._pieces[token].replace(SPACE, " ")

    def flush(self) -> str:
        """What is left of a character cut short, as U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
