"""A model's texts: prompts become ids in a text process, tokens become text here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, TypeVar

from common.errors import ArtifactError, EngineError, InvalidRequest, Overloaded
from common.form import Form
from common.parameters import Parameters
from engine.artifacts.artifact import Artifact
from engine.artifacts.generation_config import FILE as GENERATION_FILE
from engine.classification import EncodedText
from engine.generation import TextSequence, Token
from engine.labels import Labels, labels_of
from engine.rules import Rule, rules_of
from engine.statistics import Statistics
from engine.text.answer_text import AnswerText
from engine.text.child import source_of
from engine.text.constraint import Constraint, Vocabulary
from engine.text.form_child import begins_with_space
from engine.text.phrases import Phrases
from engine.text.process import TextProcesses
from engine.text.prompts import Chat, Inputs, Raw
from engine.text.table import PROCESS, Table, are_ids

ENCODE_S = 5.0  # a wide limit for a text process to encode a prompt of the greatest length
DECODE_S = 5.0  # a wide limit for a text process to decode some tokens
# Characters of an answer for each token. Tokens of real vocabularies have at most some dozens.
MAX_CHARACTERS_PER_TOKEN = 1024
MAX_PHRASES = 16  # sets of phrases that are indexed at the same time for a model

MAX_OFFSET = 1 << 31  # characters of a text

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Texts:
    """Converts a model's prompts to ids and its tokens to text, until `close`. Thread-safe."""

    stop_ids: frozenset[int]
    _table: Table
    _vocabulary: Vocabulary

    def __init__(
        self, artifact: Artifact, statistics: Statistics, max_waiting: int, processes: TextProcesses
    ) -> None:
        """Begin to start the text process, see `ready`. Raises `ArtifactError`."""
        self.file = artifact.tokenizer_file.name
        self._defaults, self._strip = artifact.generation.parameters, artifact.generation.strip
        self._vocab_size = artifact.config.vocab_size
        self.max_length = artifact.config.max_length
        self._statistics, self._max_waiting = statistics, max_waiting
        self._answers: dict[TextSequence, AnswerText | None] = {}  # None: not begun
        self._source, self._processes = source_of(artifact), processes
        self._digest = self._source[1]
        self._process = processes.acquire(self._digest, self, lambda: self.idle)
        self._forming = set[Future[list[Constraint]]]()  # of forms that are being compiled
        self._closing = threading.Lock()
        self._closed: EngineError | None = None
        self._opening = self._soon(lambda: self._process.open(self._source))

    def ready(self) -> Texts:
        """Wait until the process can use the tokenizer; returns itself. Raises `ArtifactError`."""
        if self._process.about is None:
            self._opening.result()
        about = self._process.about
        assert about is not None
        self._table, self._vocabulary = about.table, about.vocabulary
        self.stop_ids = about.stop_ids
        self._special_ids = about.special_ids | about.table.silent  # with an unknown token
        form = Parameters.parse({}, self._defaults).form
        if form is not None:
            try:
                self._vocabulary.constrain(form, 0).result()
            except InvalidRequest as error:
                raise ArtifactError(f"{GENERATION_FILE}: {error.message}") from None
        # Requests of one client often have the same phrases; indexing 100 of them takes some ms.
        self._phrases = lru_cache(MAX_PHRASES)(partial(Phrases, self._table))
        return self

    def parameters(self, given: Any) -> Parameters:
        """A request's parameters, with the model's defaults. Raises `InvalidRequest`."""
        parameters = Parameters.parse(given, self._defaults)
        if parameters.choice_logprobs:
            parameters.check_choice_logprobs()
        biased = [token for token, _ in parameters.logit_bias]
        self._check_ids("parameters.logit_bias has the token", biased)
        banned = [token for ids in parameters.bad_words_ids for token in ids]
        self._check_ids("parameters.bad_words_ids has the token", banned)
        return parameters

    def _check_ids(self, what: str, ids: list[int]) -> None:
        if (last := max(ids, default=0)) >= self._vocab_size:
            raise InvalidRequest(
                f"{what} {last}, but the model's vocabulary ends at {self._vocab_size - 1}"
            )

    def rules(self, parameters: Parameters, prompt: list[int]) -> list[Rule]:
        """Return the rules of an answer, see `engine.rules`. Run it with `soon`."""
        return rules_of(parameters, prompt, self.stop_ids, self._phrases)

    # Prompts

    def soon(self, task: Callable[[], Result]) -> Future[Result]:
        """Run `task` on the text process's thread. Raises `Overloaded` if too many are queued."""
        waiting = self._process.turns.waiting(self)
        if waiting >= self._max_waiting:
            message = f"{waiting} requests wait for their prompts to be cut already"
            raise Overloaded(message, retry_after_s=ENCODE_S)
        return self._soon(task)

    def _soon(self, task: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._closed is not None:
                    raise self._closed
                future.set_result(task())
            except BaseException as error:
                future.set_exception(self._closed or error)

        with self._closing:
            if self._closed is not None:
                raise self._closed
            self._process.turns.soon(self, run)
        return future

    def encode(self, inputs: Inputs) -> list[int]:
        """Return the ids of a prompt. Run it with `soon`. Raises as `TextProcess.call` does."""
        match inputs:
            case Raw(prompt):
                ids = self._ids("encode_raw", prompt)
            case Chat(messages):
                ids = self._ids("encode_chat", messages)
            case _:
                ids = self._ids("encode", inputs)
        if not 0 < len(ids) < self.max_length:
            raise self._process.fail(f"it gave {len(ids)} ids for a context of {self.max_length}")
        return ids

    def encode_texts(
        self, texts: Seq[Seq[str]], first: int | None, truncate: bool, offsets: bool
    ) -> list[EncodedText]:
        """Encode texts to classify, or pairs of texts. Run it with `soon`. Raises as `encode`.

        first: the place of the first of them in the request's list; None: the request has only one
        truncate: whether to shorten a text that exceeds the context
        offsets: whether to return the places of the tokens, too
        """
        names = ["inputs" if first is None else f"inputs.{first + i}" for i in range(len(texts))]
        made = self._call(ENCODE_S, "encode_texts", [*map(list, texts)], names, truncate, offsets)
        lists = 4 if offsets else 1
        if not isinstance(made, list) or len(made) != len(texts):
            raise self._process.fail("it gave no ids of the texts")
        for entry in made:
            fits = isinstance(entry, list) and len(entry) == lists
            if not fits or not are_ids(entry[0], self._vocab_size):
                raise self._process.fail("it gave no ids of the model's vocabulary")
            if not 0 < len(entry[0]) <= self.max_length:
                raise self._process.fail(f"it gave {len(entry[0])} ids of a text")
            for numbers in entry[1:]:
                if not are_ids(numbers, MAX_OFFSET) or len(numbers) != len(entry[0]):
                    raise self._process.fail("it gave no places of the tokens")
        return [EncodedText(ids, *places) for ids, *places in made]

    def tokenize(
        self, inputs: str | list[dict[str, str]], special: bool
    ) -> tuple[list[int], list[str]]:
        """Return the ids of a text or messages, even if they exceed the context, and their pieces.

        Run it with `soon`. Raises as `encode` does.
        """
        ids = self._ids("tokenize", inputs, special)
        return ids, [self._table.piece(i).decode("utf-8", "replace") for i in ids]

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens. Run it with `soon`."""
        self._check_ids("tokens has", ids)
        return self._decode(ids)[0]

    def constrain(self, form: Form, count: int) -> Future[list[Constraint]]:
        """Return the constraints of `count` new answers, see `Vocabulary.constrain`.

        `close` cancels the future.
        """
        made = self._vocabulary.constrain(form, count)
        with self._closing:
            if self._closed is not None:
                raise self._closed
            self._forming.add(made)
        made.add_done_callback(self._forming.discard)
        return made

    def labels(self, form: Form) -> Labels:
        """Encode a choice's texts, with a leading space and without. Run it with `soon`."""
        spaces = ("", " ") if begins_with_space(form) else ("",)
        ways: list[list[list[int]]] = []
        for text in form.source:
            each = [self._ids("tokenize", space + text, False) for space in spaces]
            # Drop ids that do not write the text: characters that a vocabulary lacks share one id.
            ways.append([ids for ids in each if self._writes(ids, text)])
        return labels_of(form.source, ways, self.stop_ids)

    def _writes(self, ids: list[int], text: str) -> bool:
        if self._table.kind == PROCESS:
            return bool(ids)
        return self._table.join(ids).decode("utf-8", "replace").strip() == text.strip() != ""

    def _ids(self, *arguments: Any) -> list[int]:
        ids = self._call(ENCODE_S, *arguments)
        if not are_ids(ids, self._vocab_size):
            raise self._process.fail("it gave no ids of the model's vocabulary")
        return ids

    def _call(self, timeout_s: float, *arguments: Any) -> Any:
        return self._process.call(self._source, timeout_s, *arguments)

    # Answers

    def write(self, sequences: list[TextSequence]) -> None:
        """Queue the unsent tokens of sequences to be sent with their texts. Does not block."""
        for sequence in sequences:
            self._answers.setdefault(sequence)
        decodes = self._table.kind == PROCESS
        turns = self._process.turns if decodes else self._processes.writer
        turns.soon((self, "answers"), partial(self._send_all, sequences))

    @property
    def idle(self) -> bool:
        """Whether all answers are sent completely, or cancelled."""
        return all(sequence.over for sequence in list(self._answers))

    def close(self, reason: EngineError) -> None:
        """Release the process; unsent answers fail with the reason. Does not block."""
        with self._closing:
            if self._closed is not None:
                return
            self._closed = reason
        for made in [*self._forming]:
            made.cancel()
        self._processes.release(self._digest, self)
        for task in self._process.turns.take(self):
            task()  # its future gets the reason
        for sequence in list(self._answers):
            sequence.send(reason)

    def _send_all(self, sequences: list[TextSequence]) -> None:
        for sequence in dict.fromkeys(sequences):
            try:
                for token in sequence.take_tokens():
                    if not sequence.over:
                        self._send_token(sequence, token)
            except EngineError as error:
                logger.error("the texts of %s failed: %s", self.file, error.message)
                sequence.send(self._closed or error)
            except Exception:
                logger.exception("the texts of %s failed", self.file)
                sequence.send(EngineError("the answer could not be given"))
            if sequence.over:
                self._answers.pop(sequence, None)

    def _send_token(self, sequence: TextSequence, token: Token) -> None:
        begun = self._answers.get(sequence)
        answer = begun or self._begin(sequence)
        token.text, stopped = answer.write(token.id, token.finish_reason)
        if token.logprobs is not None or token.prefill:
            token.pieces = list(map(self._table.piece, token.shown))
            token.special_ids = self._special_ids
        sequence.characters += len(token.text)
        if sequence.characters > MAX_CHARACTERS_PER_TOKEN * sequence.max_tokens:
            raise EngineError(
                f"{self.file} decodes tokens to more than {MAX_CHARACTERS_PER_TOKEN}"
                " characters each"
            )
        if stopped or token.finish_reason == "complete":
            token.finish_reason = "stop"
        self._statistics.tokens += 1
        sequence.send(token)
        if begun is None:
            seconds = time.monotonic() - sequence.received_at
            self._statistics.time_to_first_token_s.observe(seconds)
        if token.finish_reason is not None:
            self._statistics.finished(time.monotonic() - sequence.queued_at)

    def _begin(self, sequence: TextSequence) -> AnswerText:
        # A copy: the step loop adds answers meanwhile.
        for other in [other for other in list(self._answers) if other.over]:  # cancelled
            self._answers.pop(other, None)
        detokenizer = self._table.detokenizer(sequence.prompt, self._decode)
        p = sequence.parameters
        # Text that is stripped from other answers may be part of a form.
        strip = () if p.form else self._strip
        leading_space = p.form is not None and begins_with_space(p.form)
        answer = AnswerText(detokenizer, p.stop, strip, p.min_new_tokens, leading_space)
        self._answers[sequence] = answer
        return answer

    def _decode(self, ids: list[int]) -> tuple[str, int, str]:
        decoded = self._call(DECODE_S, "decode", ids)
        if isinstance(decoded, list) and list(map(type, decoded)) == [str, int, str]:
            text, begin, last = decoded
            if 0 <= begin <= len(ids):
                texts = (t.encode("utf-8", "replace").decode() for t in (text, last))
                return next(texts), begin, next(texts)
        raise self._process.fail("it gave no text")
