"""How the Java process is found, whose parent has ended."""

from __future__ import annotations

import subprocess
import sys

from serving.mms.launcher import MMS_HOME
from tests.processes import python

# What starts Java does so, and ends, while all processes are looked through.
LOOKS = """
import subprocess, sys, time
import psutil
from sagemaker_inference import model_server
from serving.mms import launcher

STARTS = (
    "import subprocess, sys; sys.stdin.readline();"
    "NOWHERE = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL};"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'java'], **NOWHERE)"
)
every, model_server.MMS_NAMESPACE = psutil.process_iter, "java"
starting = subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE)

def while_it_starts():
    yield from list(every())
    starting.stdin.write(b"now\\n")
    starting.stdin.close()
    while psutil.Process(starting.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)

psutil.process_iter = while_it_starts
try:
    launcher._find_java(sys.stdout)
except RuntimeError as error:
    print(error)
psutil.process_iter = every
java = launcher._find_java(sys.stdout)
print(java.cmdline()[-1])
java.kill()
"""


def test_java_that_starts_while_it_is_looked_for_is_found_the_next_time() -> None:
    done = python("-c", LOOKS, start_new_session=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:2] == [
        "Multi Model Server's Java process is not there yet",
        "java",
    ]


def test_the_collector_of_metrics_reads_all_that_java_writes() -> None:
    collector = MMS_HOME / "mms" / "metrics" / "metric_collector.py"
    with subprocess.Popen([sys.executable, collector], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"9000:1234\n" * 100_000)  # more than a pipe holds
        process.stdin.close()
        assert process.wait(60) == 0
