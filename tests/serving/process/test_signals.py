from __future__ import annotations

import signal

import pytest

from tests.processes import python

SEND = """
import os, signal
from serving.process.signals import StopSignals
if {ignored}:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
signals = StopSignals()
for number in {numbers}:
    os.kill(os.getpid(), number)
signals.sleep(60)
print(signals.received)
signals.close()
"""
TERM, INT, HUP = int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)


@pytest.mark.parametrize(
    ("ignored", "numbers", "received"),
    [(False, [INT, TERM], INT), (False, [HUP, TERM], HUP), (True, [HUP, TERM], TERM)],
)
def test_the_first_signal_counts_and_a_sighup_that_was_ignored_stays_so(
    ignored: bool, numbers: list[int], received: int
) -> None:
    done = python("-c", SEND.format(ignored=ignored, numbers=numbers))
    assert (done.stdout, done.stderr) == (f"{received}\n", "")
