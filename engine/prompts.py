"""A model's way with text: from a request's inputs to ids, and where and how an answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.artifacts import Artifact
from engine.errors import ArtifactError, EngineError, InvalidRequest, PromptTooLong
from engine.generation import FILE
from engine.parameters import Parameters
from engine.tokenizers import Detokenizer, SentencePieceTokenizer, Tokenizer

Inputs = str | Mapping[str, str]
# Real text has two to six characters a token, and a run of spaces or unknown characters may be one
# token. What is far beyond either is not cut only to be counted: megabytes take seconds.
CHARACTERS_PER_TOKEN = 64


class Prompts:
    """The artifact's tokenizer, template and defaults. Raises `ArtifactError` that says what does
    not fit."""

    def __init__(self, artifact: Artifact) -> None:
        self._vocab_size, self._max_length = artifact.config.vocab_size, artifact.config.max_length
        self._generation = artifact.generation
        self.tokenizer = _open_tokenizer(artifact)
        if self.tokenizer.vocab_size > self._vocab_size:
            raise ArtifactError(
                f"{artifact.tokenizer_file.name} has {self.tokenizer.vocab_size} pieces,"
                f" but the model's vocabulary has {self._vocab_size}"
            )
        ends = self._generation.end_ids
        if ends is None:
            ends = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        self.stop_ids = frozenset(ends) | {self._stop_id(t) for t in self._generation.stop_tokens}
        self.strip = self._generation.strip
        if self._generation.template is not None:  # that it can be tokenized at all
            try:
                self.encode(dict.fromkeys(self._generation.template.fields, "가"))
            except EngineError as error:
                raise ArtifactError(f"{FILE}: template: {error.message}") from None

    def _stop_id(self, token: str) -> int:
        found = self.tokenizer.token_id(token)
        if found is None:
            raise ArtifactError(f"{FILE}: stop_tokens: the tokenizer has no token {token}")
        return found

    def parameters(self, given: Any) -> Parameters:
        """A request's, and the model's own where it gives none. Raises `InvalidRequest`."""
        return Parameters.parse(given, self._generation.parameters)

    def encode(self, inputs: Inputs) -> list[int]:
        """Raises `InvalidRequest`, and `PromptTooLong` for what fills the context."""
        if not inputs:
            raise InvalidRequest("inputs is empty, must be text")
        texts = [inputs] if isinstance(inputs, str) else list(inputs.values())
        length = sum(map(len, texts))
        most = self._max_length * CHARACTERS_PER_TOKEN
        if length > most:
            raise PromptTooLong(
                f"inputs has {length} characters, more than the {most} that are cut into tokens"
                f" for this model's context of {self._max_length} tokens"
            )
        ids = self._encode(inputs)
        if len(ids) >= self._max_length:
            raise PromptTooLong(
                f"inputs has {len(ids)} tokens, at most {self._max_length - 1} fit into the model's"
                " context"
            )
        if not ids:
            raise InvalidRequest("inputs holds nothing that this model's tokenizer makes tokens of")
        if max(ids) >= self._vocab_size:
            raise InvalidRequest(
                f"inputs makes the token {max(ids)}, but the model's vocabulary ends at"
                f" {self._vocab_size - 1}"
            )
        return ids

    def _encode(self, inputs: Inputs) -> list[int]:
        template = self._generation.template
        if template is not None:
            return self.tokenizer.encode_parts(template.fill(inputs))
        if not isinstance(inputs, str):
            raise InvalidRequest(
                f"inputs must be text: the model brings no template with fields ({FILE})"
            )
        return self.tokenizer.encode(inputs)

    def detokenizer(self, prompt: list[int]) -> Detokenizer:
        return self.tokenizer.detokenizer(prompt)


def _open_tokenizer(artifact: Artifact) -> Tokenizer:
    if artifact.tokenizer_file.suffix == ".spiece":
        return SentencePieceTokenizer(artifact.tokenizer_file)
    from engine.hugging_face_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(artifact.tokenizer_file)
