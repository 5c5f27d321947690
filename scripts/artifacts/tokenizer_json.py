"""Converts a sentencepiece BPE model into a `tokenizer.json` that gives the same ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from command.errors import Problem
from engine.text.hugging_face import HuggingFaceTokenizer
from engine.text.sentencepiece import SPACE, SentencePieceTokenizer

messages: Any = sentencepiece_model_pb2  # protobuf creates its classes at import

BPE = 2  # sentencepiece's number for the model type
TEXTS = (
    "안녕하세요. 오늘은 날씨가 참 좋습니다!",
    "나 보기가 역겨워 가실 때에는 말없이 고이 보내 드리우리다.",
    "  빈칸이   여럿   있고  ",
    "한국어와 English, 숫자 2,024.5 그리고 漢字.",
    "이모지 🙂 😤 👩‍👩‍👧 도 있다 ㅋㅋㅋ ㅠㅠ ^^;",
    "줄이\n바뀌고\t탭도 있다",
    "café naïve ＡＢＣ ①② ㈜회사 ﬁ",
    "뷁쀍쮉 헿 꿹",
    "a",
    "가",
    " ",
    "",
)


def convert(spiece: Path) -> Tokenizer:
    """Convert a sentencepiece model. Raises `Problem` if it is not a BPE model."""
    proto: Any = messages.ModelProto.FromString(spiece.read_bytes())
    if proto.trainer_spec.model_type != BPE:
        raise Problem(f"{spiece.name} is no BPE model; only BPE models can become a tokenizer.json")
    kinds = proto.SentencePiece
    pieces = [(p.piece, p.score, p.type) for p in proto.pieces]
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    unknown = next(piece for piece, _, kind in pieces if kind == kinds.UNKNOWN)
    normal = {piece for piece, _, kind in pieces if kind == kinds.NORMAL}
    bytes_too = any(kind == kinds.BYTE for _, _, kind in pieces)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(pieces, ids, normal),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bytes_too,
            ignore_merges=True,
        )
    )
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    symbols = [piece for piece, _, kind in pieces if kind == kinds.USER_DEFINED]
    if symbols:  # never split; the text around them is normalized together
        symbols.sort(key=len, reverse=True)
        pattern = Regex("|".join(re.escape(symbol) for symbol in symbols))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if bytes_too:
        steps += [decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Fuse()])
    controls = [piece for piece, _, kind in pieces if kind == kinds.CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in controls])
    if "<s>" in controls:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
        )
    return tokenizer


def _merges(
    pieces: list[tuple[str, float, int]], ids: dict[str, int], normal: set[str]
) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join to a piece, in sentencepiece's order of merging."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score, _ in pieces:
        if piece not in normal:
            continue
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in normal and right in normal:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _normalizer(spec: Any) -> Any:
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def must_agree(spiece: Path, tokenizer_json: Path, texts: list[str]) -> int:
    """Check that two tokenizers agree on `texts`, built-in texts and every piece.

    Returns the number of texts. Raises `Problem` with the first that differs.
    """
    ours, theirs = SentencePieceTokenizer(spiece), HuggingFaceTokenizer(tokenizer_json)
    controls = [ours._pieces[i] for i in ours.special_ids]
    pieces = [piece.replace(SPACE, " ") for piece in ours._pieces if piece not in controls]
    # Texts with control pieces are not compared: those never come from text.
    texts = [t for t in [*TEXTS, *texts, *pieces] if not any(p in t for p in controls)]
    for text in texts:
        before, after = ours.encode(text), theirs.encode(text)
        if before != after:
            raise Problem(
                f"{spiece.name} and the tokenizer.json differ: {text!r} is {before[:12]} and"
                f" {after[:12]}"
            )
    return len(texts)
