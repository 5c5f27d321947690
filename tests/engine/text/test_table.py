"""Texts by the table of a tokenizer are those that its process decodes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from engine.text.hugging_face import HuggingFaceTokenizer
from engine.text.sentencepiece import SentencePieceTokenizer
from engine.text.table import BYTES, PROCESS, RUNS, Table, WindowDetokenizer
from testbed import random_model
from tests.engine.hugging_face import KINDS, MORE, SPECIAL, train_tokenizer
from tests.engine.sentences import SENTENCES

ODD = ("<usr>안녕<sys>", "<s>", "🙂", " ", "  두  칸", "뷁\n\n漢", "a <unused0> b")
TEXTS = (*SENTENCES, *MORE, *ODD)


def llama(tokenizer: Tokenizer) -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def never(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")


def words(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.WordPiece()


def marked(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens(["▁이모", "a b"])


def latin(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens(["é", "<질문>", AddedToken("한 국", special=False)])


def same(tokenizer: Tokenizer) -> None: ...


CASES: list[tuple[str, Callable[[Tokenizer], None], str, int]] = [
    ("metaspace", same, RUNS, 1 << 16),
    ("metaspace", never, RUNS, 0),
    ("metaspace", marked, PROCESS, 0),
    ("metaspace", words, PROCESS, 0),
    ("byte-level", same, BYTES, 0),
    ("byte-level", latin, PROCESS, 0),
    ("byte-fallback", same, RUNS, 0),
    ("byte-fallback", llama, RUNS, 1),
    ("char-bpe", same, PROCESS, 0),
]


def made(path: Path, kind: str, change: Callable[[Tokenizer], None]) -> HuggingFaceTokenizer:
    tokenizer = train_tokenizer(kind)
    change(tokenizer)
    tokenizer.save(str(path / "tokenizer.json"))
    return HuggingFaceTokenizer(path / "tokenizer.json")


@pytest.mark.parametrize(("kind", "change", "expected", "lead"), CASES)
def test_each_token_has_the_text_that_the_process_gives_it(
    tmp_path: Path, kind: str, change: Callable[[Tokenizer], None], expected: str, lead: int
) -> None:
    tokenizer = made(tmp_path, kind, change)
    size = tokenizer._tokenizer.get_vocab_size() + 5
    table = Table.from_json(json.loads(json.dumps(tokenizer.table(size).to_json())))
    assert (table.kind, table.lead) == (expected, lead)
    rng = random.Random(3)  # noqa: S311
    odd = sorted(tokenizer._byte_ids) or [*range(len(SPECIAL))]  # bytes, cut characters, controls
    decode = tokenizer._tokenizer.decode
    for trial in range(300):
        prompt = tokenizer.encode(rng.choice(TEXTS)) or [0]
        ids = tokenizer.encode(rng.choice(TEXTS))
        if trial % 3:
            ids = [rng.choice([rng.randrange(size), rng.choice(odd)]) for _ in range(20)]
        whole = trial % 3 < 2  # whether the prompt ends with a character
        if not whole:
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        while whole and prompt and prompt[-1] in tokenizer._byte_ids:
            prompt.pop()
        here = table.detokenizer(prompt, tokenizer.decode)
        there = WindowDetokenizer(table, prompt, tokenizer.decode)
        pieces = [*map(here.feed, ids), here.flush()]
        assert pieces == [*map(there.feed, ids), there.flush()]
        if whole and change is same:  # and as the library decodes all at once
            assert "".join(pieces) == decode(prompt + ids)[len(decode(prompt)) :]


@pytest.mark.parametrize("name", ["dongju", "sowol"])
def test_the_demo_models_texts_are_those_of_the_guides_loop(tmp_path: Path, name: str) -> None:
    [spiece] = random_model.demo(name, tmp_path).glob("*.spiece")
    tokenizer = SentencePieceTokenizer(spiece)
    model = tokenizer._model
    table = Table.from_json(json.loads(json.dumps(tokenizer.table(60_000).to_json())))
    # The guides' loop writes a byte as <0xE8>.
    ids = [i for i in range(tokenizer.vocab_size) if not model.is_byte(i)]
    random.Random(3).shuffle(ids)  # noqa: S311
    loop = ["" if model.is_control(i) else model.id_to_piece(i).replace("▁", " ") for i in ids]
    assert len(loop) > 1000
    assert list(map(table.detokenizer([], tokenizer.decode).feed, ids)) == loop


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_other_marks_has_a_table_too(tmp_path: Path, kind: str) -> None:
    """The pieces are then those that the library decodes."""
    tokenizer = made(tmp_path, kind, same)
    content = (tmp_path / "tokenizer.json").read_text(encoding="utf-8").replace("▁", "▂")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    other = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    mine, theirs = tokenizer.table(700), other.table(700)
    assert mine.kind == theirs.kind
    assert [mine.piece(i) for i in range(700)] == [theirs.piece(i) for i in range(700)]
