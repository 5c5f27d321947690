"""Text becomes ids in the one best way, and ids become text piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ArtifactError, InvalidRequest
from engine.text.sentencepiece import SentencePieceTokenizer
from engine.text.table import Detokenizer
from tests.engine.models import spiece
from tests.engine.sentences import SENTENCES

TEXTS = (*SENTENCES, "안녕 하세요", " 앞에 빈칸", "두  칸", "한국어와 English 123")
CUT = "\ufffd"  # in the place of a character whose bytes are not all there


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "kogpt2.spiece"
    path.write_bytes(spiece())
    return SentencePieceTokenizer(path)


@pytest.fixture(scope="module")
def with_bytes(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """A tokenizer that spells unknown characters in bytes."""
    path = tmp_path_factory.mktemp("tokenizer") / "bytes.spiece"
    path.write_bytes(spiece(420, byte_fallback=True))
    return SentencePieceTokenizer(path)


def pieces(tokenizer: SentencePieceTokenizer, ids: list[int]) -> list[str]:
    return [tokenizer._model.id_to_piece(i) for i in ids]


def detokenizer_of(tokenizer: SentencePieceTokenizer) -> Detokenizer:
    return tokenizer.table(tokenizer.vocab_size).detokenizer([], tokenizer.decode)


def text_of(tokenizer: SentencePieceTokenizer, ids: list[int]) -> str:
    detokenizer = detokenizer_of(tokenizer)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()


def test_a_prompt_begins_with_the_begin_token(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.encode("안녕하세요")[0] == tokenizer.bos_id == 2
    assert tokenizer.encode("") == [2]
    assert pieces(tokenizer, [2, tokenizer.eos_id or 0]) == ["<s>", "</s>"]


def test_control_tokens_and_unknown_ids_are_no_text(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("물을 마신다")[1:]
    assert text_of(tokenizer, [1, 2, 3]) == ""  # <pad> <s> </s>
    assert text_of(tokenizer, [2, *ids[:1], 1, *ids[1:], 3]) == text_of(tokenizer, ids)
    assert text_of(tokenizer, [tokenizer.vocab_size, 49_999]) == ""
    # The symbols of a chat fine-tune are tokens, and text.
    chat = tokenizer.encode("<usr> 안녕<sys>")
    assert {"<usr>", "<sys>"} < {*pieces(tokenizer, chat)}
    assert text_of(tokenizer, chat)[-5:] == "<sys>"


@pytest.mark.parametrize("text", ["뷁", "漢字와 한글", "👩‍👩‍👧 가족", "é à ü", "끝😀"])
def test_text_in_bytes_comes_back_whole(with_bytes: SentencePieceTokenizer, text: str) -> None:
    assert text_of(with_bytes, with_bytes.encode(text)).removeprefix(" ") == text


def test_a_character_in_bytes_comes_whole_or_cut(with_bytes: SentencePieceTokenizer) -> None:
    ids, word = with_bytes.encode("😀")[-4:], with_bytes.encode("날씨")[1:]
    assert all(piece.startswith("<0x") for piece in pieces(with_bytes, ids))
    one, other = detokenizer_of(with_bytes), detokenizer_of(with_bytes)
    fed = [(one.feed(i), other.feed(i)) for i in ids]
    assert fed == [("", ""), ("", ""), ("", ""), ("😀", "😀")]
    assert text_of(with_bytes, ids[:-1]) == CUT
    assert text_of(with_bytes, [*ids[:-1], *word]) == CUT + text_of(with_bytes, word)
    assert with_bytes.eos_id is not None
    assert [one.feed(i) for i in (ids[0], with_bytes.eos_id, ids[3])] == ["", CUT, CUT]
    one.feed(ids[0])
    assert one.flush() == CUT
    assert "".join(map(one.feed, ids)) == "😀"


def test_half_a_surrogate_pair_is_refused(tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("가\ud83d나")


@pytest.mark.parametrize("content", [b"", b"not a model", spiece()[: len(spiece()) // 2], None])
def test_a_damaged_tokenizer_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "damaged.spiece"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"damaged\.spiece is"):
        SentencePieceTokenizer(path)


def test_a_text_with_a_control_token_is_not_plain(tokenizer: SentencePieceTokenizer) -> None:
    tokenizer.check_plain("오늘은 <날씨가> 좋다 s>")
    for text in ("</s>", "안녕<usr>하세요"):
        with pytest.raises(InvalidRequest, match="which is reserved for this model's template"):
            tokenizer.check_plain(text)
