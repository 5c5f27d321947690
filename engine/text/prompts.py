"""A model's prompts: from a request's inputs to ids, and the ids that end an answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ArtifactError, EngineError, InvalidRequest, PromptTooLong
from engine.artifacts.artifact import Artifact
from engine.artifacts.generation_config import FILE, Part
from engine.text.files import CHAT_TEMPLATE, CONFIG, Files, read_files
from engine.text.sentencepiece import SentencePieceTokenizer

if TYPE_CHECKING:
    from engine.text.chat_template import ChatTemplate
    from engine.text.hugging_face import HuggingFaceTokenizer


@dataclass(frozen=True)
class Raw:
    """A text or ids to continue as they are, without the template."""

    prompt: str | list[int]


@dataclass(frozen=True)
class Chat:
    """Messages `{"role", "content"}`, for the model's chat template."""

    messages: list[dict[str, str]]


Inputs = str | Mapping[str, str] | Raw | Chat
# Characters of a prompt for each token of the context; longer ones are refused before they are
# tokenized, which takes seconds for megabytes. Real text has two to six characters a token, but a
# run of spaces or unknown characters may be one token.
CHARACTERS_PER_TOKEN = 64
BYTES_PER_CHARACTER = 12  # in JSON: beyond U+FFFF two escapes of 6 bytes
PARAMETERS_BYTES = 256 << 10
ADVICE = (
    "add chat_template.jinja to its folder, or chat_template to tokenizer_config.json, as"
    " transformers' apply_chat_template takes it"
)

CUT = "; parameters.truncation true cuts such texts"


def check_bytes(length: int, max_length: int) -> None:
    """Raise `PromptTooLong` for a request's body that is longer than that of any valid prompt.

    Parsing megabytes of JSON would hold the interpreter's lock, for which the step loop waits.
    """
    most = max_length * CHARACTERS_PER_TOKEN * BYTES_PER_CHARACTER + PARAMETERS_BYTES
    if length > most:
        raise PromptTooLong(
            f"the request has {length} bytes, more than the {most} that are read for this model's"
            f" context of {max_length} tokens"
        )


class Prompts:
    """The tokenizer and templates of an artifact; `files`: the tokenizer's, if already read."""

    def __init__(self, artifact: Artifact, files: Files | None = None) -> None:
        self._vocab_size, self._max_length = artifact.config.vocab_size, artifact.config.max_length
        self._generation = artifact.generation
        files = files or read_files(artifact.tokenizer_file)
        self.tokenizer = _open_tokenizer(artifact.tokenizer_file, files)
        self._beside = {n: c for n, c in files.items() if n in (CHAT_TEMPLATE, CONFIG)}
        if self.tokenizer.vocab_size > self._vocab_size:
            raise ArtifactError(
                f"{artifact.tokenizer_file.name} has {self.tokenizer.vocab_size} pieces,"
                f" but the model's vocabulary has {self._vocab_size}"
            )
        ends = self._generation.end_ids
        if ends is None:
            ends = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        self.stop_ids = frozenset(ends) | {self._stop_id(t) for t in self._generation.stop_tokens}
        if self._generation.template is not None:  # check that it can be tokenized
            try:
                self.encode(dict.fromkeys(self._generation.template.fields, "가"))
            except EngineError as error:
                raise ArtifactError(f"{FILE}: template: {error.message}") from None

    def _stop_id(self, token: str) -> int:
        token_id = self.tokenizer.token_id(token)
        if token_id is None:
            raise ArtifactError(f"{FILE}: stop_tokens: the tokenizer has no token {token}")
        return token_id

    def encode(self, inputs: str | Mapping[str, str]) -> list[int]:
        """Encode a text or fields in the template. Raises `InvalidRequest`, `PromptTooLong`."""
        if not inputs:
            raise InvalidRequest("inputs is empty, must be text")
        texts = [inputs] if isinstance(inputs, str) else list(inputs.values())
        self._check_length("inputs", texts)
        return self._checked("inputs", self._encode(inputs))

    def encode_raw(self, prompt: str | list[int]) -> list[int]:
        """Encode a text, or check ids, without the template. Raises as `encode` does."""
        if isinstance(prompt, str):
            self._check_length("prompt", [prompt])
            prompt = self.tokenizer.encode(prompt)
        return self._checked("prompt", prompt)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Encode messages in the chat template, or a single message in `generation.json`'s."""
        return self._checked("messages", self._chat_ids(messages))

    def tokenize(self, inputs: str | list[dict[str, str]], special: bool) -> list[int]:
        """Encode a text or messages, even if the ids exceed the context.

        `special`: add the special tokens that the tokenizer puts in front of a text. Raises
        `InvalidRequest`, `PromptTooLong`.
        """
        if not isinstance(inputs, str):
            return self._known("messages", self._chat_ids(inputs))
        self._check_length("prompt", [inputs])
        encode = self.tokenizer.encode
        ids = encode(inputs) if special else self.tokenizer.encode_parts([Part(inputs)])
        return self._known("prompt", ids)

    def encode_texts(
        self, texts: list[list[str]], names: list[str], truncate: bool, offsets: bool
    ) -> list[list[list[int]]]:
        """Encode texts to classify, or pairs of texts, each with the tokenizer's special tokens.

        Return for each text its ids and, with `offsets`, the character in which each token begins,
        the one behind it, and 1 for the special tokens.

        names: of the texts in error messages
        truncate: whether to shorten a text that exceeds the context. Raises as `encode` does
        """
        encoded = []
        for parts, name in zip(texts, names, strict=True):
            if truncate:
                most = self._max_length * CHARACTERS_PER_TOKEN // len(parts)
                parts = [self.tokenizer.cut(part, most) for part in parts]
            self._check_length(name, parts)
            limit = self._max_length if truncate else None
            ids, *places = self.tokenizer.encode_text(parts, limit, offsets)
            encoded.append([self._fitting(name, ids, self._max_length, CUT), *places])
        return encoded

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        texts = [message["content"] for message in messages]
        self._check_length("messages", texts)
        chat, template = self._chat_template, self._generation.template
        if chat is not None:
            for text in texts:
                self.tokenizer.check_plain(text)
            prompt = chat.render(messages)
            self._check_length("messages", [prompt])
            return self.tokenizer.encode_parts([Part(prompt)])
        if template is None:
            raise InvalidRequest(f"the model has no chat template: {ADVICE}")
        if [message["role"] for message in messages] != ["user"]:
            raise InvalidRequest(
                f"messages: the model's template ({FILE}) takes one message of the user's and"
                f" nothing else. For more: {ADVICE}"
            )
        return self._encode(texts[0])

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate | None:
        from engine.text import chat_template  # imports Jinja, which few models need

        template = chat_template.find_chat_template(self._beside)
        if template is None:
            return None
        return chat_template.ChatTemplate(*template, self.tokenizer.special_tokens)

    def _check_length(self, name: str, texts: list[str]) -> None:
        length = sum(map(len, texts))
        most = self._max_length * CHARACTERS_PER_TOKEN
        if length > most:
            raise PromptTooLong(
                f"{name} has {length} characters, more than the {most} that are cut into tokens"
                f" for this model's context of {self._max_length} tokens"
            )

    def _checked(self, name: str, ids: list[int]) -> list[int]:
        return self._fitting(name, ids, self._max_length - 1)  # and a token of the answer

    def _fitting(self, name: str, ids: list[int], most: int, advice: str = "") -> list[int]:
        if len(ids) > most:
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, at most {most} fit into the model's context{advice}"
            )
        if not ids:
            raise InvalidRequest(
                f"{name} holds nothing that this model's tokenizer makes tokens of"
            )
        return self._known(name, ids)

    def _known(self, name: str, ids: list[int]) -> list[int]:
        if max(ids, default=0) >= self._vocab_size:
            raise InvalidRequest(
                f"{name} makes the token {max(ids)}, but the model's vocabulary ends at"
                f" {self._vocab_size - 1}"
            )
        return ids

    def _encode(self, inputs: str | Mapping[str, str]) -> list[int]:
        template = self._generation.template
        if template is not None:
            return self.tokenizer.encode_parts(template.fill(inputs))
        if not isinstance(inputs, str):
            raise InvalidRequest(
                f"inputs must be text: the model brings no template with fields ({FILE})"
            )
        return self.tokenizer.encode(inputs)


def _open_tokenizer(file: Path, files: Files) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    if file.suffix == ".spiece":
        return SentencePieceTokenizer(file, files)
    from engine.text.hugging_face import HuggingFaceTokenizer

    return HuggingFaceTokenizer(file, files)
