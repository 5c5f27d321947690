"""Sentences on which the tests' tokenizers are trained."""

from __future__ import annotations

SENTENCES = (
    "안녕하세요. 오늘은 날씨가 참 좋습니다.",
    "나는 아침에 일어나서 물을 한 잔 마신다.",
    "한국어 언어 모델은 다음에 올 말을 맞힌다.",
    "서울에서 부산까지 기차로 세 시간쯤 걸린다.",
    "고양이가 창가에 앉아서 밖을 보고 있다.",
    "2020년에 나온 작은 모델을 아직도 많이 쓴다.",
    "비가 오는 날에는 집에서 책을 읽는 것이 좋다.",
    "The quick brown fox, 그리고 게으른 개.",
)
