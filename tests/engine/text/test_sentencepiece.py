"""Text becomes ids in the one best way, and ids become text piece by piece."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from common.errors import ArtifactError, InvalidRequest
from engine.text.sentencepiece import SPACE, SentencePieceTokenizer
from engine.text.table import Detokenizer
from tests.engine.models import spiece
from tests.engine.sentences import SENTENCES

TEXTS = (
    *SENTENCES,
    "안녕 하세요",
    " 앞에 빈칸",
    "두  칸",
    "한국어와 English 123",
)
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "kogpt2.spiece"
    path.write_bytes(spiece())
    return SentencePieceTokenizer(path)


@pytest.fixture(scope="module")
def with_bytes(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """A tokenizer that spells unknown characters in bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "bytes.spiece"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


def pieces(path_or_tokenizer: SentencePieceTokenizer, ids: list[int]) -> list[str]:
    return [path_or_tokenizer._model.id_to_piece(i) for i in ids]


def detokenizer_of(tokenizer: SentencePieceTokenizer) -> Detokenizer:
    return tokenizer.table(tokenizer.vocab_size).detokenizer([], tokenizer.decode)


def text_of(tokenizer: SentencePieceTokenizer, ids: list[int]) -> str:
    detokenizer = detokenizer_of(tokenizer)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()


def test_a_prompt_begins_with_the_begin_token(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.encode("안녕하세요")[0] == tokenizer.bos_id == 2
    assert tokenizer.encode("") == [tokenizer.bos_id]


def test_the_special_tokens_are_found_by_name(tokenizer: SentencePieceTokenizer) -> None:
    assert pieces(tokenizer, [tokenizer.bos_id or 0, tokenizer.eos_id or 0]) == ["<s>", "</s>"]
    assert tokenizer.encode("<usr> 안녕")[1:3] != tokenizer.encode("usr 안녕")[1:3]
    assert "<usr>" in pieces(tokenizer, tokenizer.encode("<usr> 안녕"))


def test_encoding_is_the_same_every_time(tokenizer: SentencePieceTokenizer) -> None:
    for text in TEXTS:
        first = tokenizer.encode(text)
        assert all(tokenizer.encode(text) == first for _ in range(20))


def test_encoding_takes_whole_pieces_and_not_single_characters(
    tokenizer: SentencePieceTokenizer,
) -> None:
    ids = tokenizer.encode(SENTENCES[0])
    assert len(ids) - 1 < len(SENTENCES[0])


def test_ids_become_text_as_in_the_loop_of_the_guides(tokenizer: SentencePieceTokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)[1:]
        loop = "".join(piece.replace(SPACE, " ") for piece in pieces(tokenizer, ids))
        assert text_of(tokenizer, ids) == loop


def test_encoded_text_comes_back(tokenizer: SentencePieceTokenizer) -> None:
    for sentence in SENTENCES:
        assert text_of(tokenizer, tokenizer.encode(sentence)) == " " + sentence


def test_every_piece_is_given_at_once(tokenizer: SentencePieceTokenizer) -> None:
    detokenizer = detokenizer_of(tokenizer)
    ids = tokenizer.encode(SENTENCES[1])[1:]
    fed = [detokenizer.feed(i) for i in ids]
    assert fed == [piece.replace(SPACE, " ") for piece in pieces(tokenizer, ids)]
    assert detokenizer.flush() == ""


def test_control_pieces_are_silent(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("물을 마신다")[1:]
    controls = [1, 2, 3]  # <pad> <s> </s>
    assert text_of(tokenizer, controls) == ""
    assert text_of(tokenizer, [2, *ids[:1], 1, *ids[1:], 3]) == text_of(tokenizer, ids)


def test_the_symbols_of_a_chat_fine_tune_are_text(tokenizer: SentencePieceTokenizer) -> None:
    assert text_of(tokenizer, tokenizer.encode("<usr>안녕<sys>"))[-5:] == "<sys>"


def test_ids_beyond_the_vocabulary_are_silent(tokenizer: SentencePieceTokenizer) -> None:
    assert text_of(tokenizer, [tokenizer.vocab_size, 49_999]) == ""


def test_a_character_in_bytes_is_held_back_until_it_is_whole(
    with_bytes: SentencePieceTokenizer,
) -> None:
    ids = with_bytes.encode("😀")[1:]
    in_bytes = [i for i in ids if pieces(with_bytes, [i])[0].startswith("<0x")]
    assert len(in_bytes) == 4
    detokenizer = detokenizer_of(with_bytes)
    assert [detokenizer.feed(i) for i in in_bytes] == ["", "", "", "😀"]


@pytest.mark.parametrize("text", ["뷁", "漢字와 한글", "👩‍👩‍👧 가족", "é à ü", "끝😀"])
def test_text_in_bytes_comes_back_whole(with_bytes: SentencePieceTokenizer, text: str) -> None:
    assert text_of(with_bytes, with_bytes.encode(text)).removeprefix(" ") == text


def test_a_character_cut_short_becomes_one_replacement_character(
    with_bytes: SentencePieceTokenizer,
) -> None:
    word = with_bytes.encode("날씨")[1:]
    cut = with_bytes.encode("😀")[1:][:-1]
    found = text_of(with_bytes, [*cut, *word])
    assert found.strip() == REPLACEMENT + text_of(with_bytes, word)
    assert text_of(with_bytes, cut).strip() == REPLACEMENT


def test_a_control_piece_inside_a_character_ends_it(with_bytes: SentencePieceTokenizer) -> None:
    first, *_, last = with_bytes.encode("😀")[-4:]
    assert with_bytes.eos_id is not None
    detokenizer = detokenizer_of(with_bytes)
    assert detokenizer.feed(first) == ""
    assert detokenizer.feed(with_bytes.eos_id) == REPLACEMENT
    assert detokenizer.feed(last) == REPLACEMENT


def test_a_detokenizer_can_be_used_again_after_a_flush(with_bytes: SentencePieceTokenizer) -> None:
    ids = with_bytes.encode("😀")[-4:]
    detokenizer = detokenizer_of(with_bytes)
    detokenizer.feed(ids[0])
    assert detokenizer.flush() == REPLACEMENT
    assert "".join(map(detokenizer.feed, ids)) == "😀"


def test_two_answers_do_not_share_what_is_held_back(with_bytes: SentencePieceTokenizer) -> None:
    ids = with_bytes.encode("😀")[-4:]
    one, other = detokenizer_of(with_bytes), detokenizer_of(with_bytes)
    fed = [(one.feed(i), other.feed(i)) for i in ids]
    assert fed[-1] == ("😀", "😀")


def test_half_a_surrogate_pair_is_refused(tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("가\ud83d나")


@pytest.mark.parametrize("content", [b"", b"not a model", spiece()[: len(spiece()) // 2]])
def test_a_damaged_tokenizer_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.spiece"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"damaged\.spiece is not a sentencepiece model"):
        SentencePieceTokenizer(path)


def test_a_folder_with_the_name_of_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder.spiece"
    path.mkdir()
    with pytest.raises(ArtifactError, match=r"folder\.spiece"):
        SentencePieceTokenizer(path)


def test_the_pieces_of_a_text_are_its_bytes(
    tokenizer: SentencePieceTokenizer, with_bytes: SentencePieceTokenizer
) -> None:
    whole, in_bytes = (t.table(t.vocab_size) for t in (tokenizer, with_bytes))
    ids = tokenizer.encode("오늘은 날씨가")
    assert b"".join(map(whole.piece, ids)) == "<s> 오늘은 날씨가".encode()
    pieces = list(map(in_bytes.piece, with_bytes.encode("뷁 🙂")))
    assert b"".join(pieces) == "<s> 뷁 🙂".encode()
    assert "🙂".encode()[:1] in pieces
    assert whole.piece(10_000) == b""


def test_a_text_with_a_control_token_is_told_from_a_plain_one(
    tokenizer: SentencePieceTokenizer,
) -> None:
    tokenizer.check_plain("오늘은 <날씨가> 좋다 s>")
    for text in ("</s>", "안녕<usr>하세요"):
        with pytest.raises(InvalidRequest, match="which is reserved for this model's template"):
            tokenizer.check_plain(text)
