from __future__ import annotations

from serving.api.metrics import GONE_S, MAX_GONE, Metrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_model_that_was_gone_at_the_next_scrape_was_still_there() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    metrics.request("봄", 200, 0.1)
    line = 'kogpt2_requests_total{model="봄",status="200"} %d.0'
    for _ in range(3):  # by however many
        assert line % 1 in metrics.text(None, {}, {}).decode()
        clock.now_s += GONE_S / 4
    metrics.request("봄", 200, 0.1)
    assert line % 2 in metrics.text(None, {"봄#1": "봄"}, {}).decode()  # it came back
    clock.now_s += GONE_S
    assert line % 2 in metrics.text(None, {}, {}).decode()
    clock.now_s += GONE_S
    assert "봄" not in metrics.text(None, {}, {}).decode()
    assert metrics.tallies["봄"].good[0] == 2  # the console's and Triton's, whoever scrapes


def test_those_that_are_gone_are_bounded() -> None:
    metrics = Metrics(Clock())
    for number in range(MAX_GONE + 5):
        metrics.request(f"m{number}", 200, 0.1)
    shown = metrics.text(None, {"m0#1": "m0"}, {}).decode()
    assert shown.count("kogpt2_requests_total{") == MAX_GONE + 1
    assert 'model="m0"' in shown
