"""Counters of a model since it was loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.histogram import Histogram


@dataclass
class Statistics:
    requests: int = 0
    tokens: int = 0
    texts: int = 0  # that were classified
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused
    steps: int = 0
    rows: int = 0  # summed over steps: rows / steps is the mean batch size
    guessed_tokens: int = 0
    accepted_tokens: int = 0  # guessed tokens that the sampler drew
    queue_s: Histogram = field(default_factory=Histogram)  # from the queue to the first pass
    # From a request's receipt, before it is tokenized, to the sending of an answer's first token.
    time_to_first_token_s: Histogram = field(default_factory=Histogram)
    seconds_per_request: float = 0.0  # moving average

    def finished(self, seconds: float) -> None:
        average = self.seconds_per_request or seconds  # begins with the first request's
        self.seconds_per_request = average + (seconds - average) / 8
