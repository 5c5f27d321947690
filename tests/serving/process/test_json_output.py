from __future__ import annotations

import json
import re
import subprocess
import sys

from serving.process.json_output import MAX_QUEUED_BYTES
from tests.e2e.server import REPOSITORY

LINE_BYTES = 1000


def run(code: str) -> subprocess.Popen[bytes]:
    code = f"import os, sys, threading\nfrom serving.process.json_output import JsonOutput\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_lines_of_all_processes_become_json() -> None:
    done = run("""
output = JsonOutput("mms")
os.system("echo 봄; echo 'warning: 가을' >&2; echo '{\\"message\\": \\"여름\\"}'; echo [")
print("[" * 100_000, "끝", sep="\\n", flush=True)
output.write("그대로\\n".encode())
output.close()
print("뒤")
""")
    said, errors = done.communicate(timeout=60)
    assert not errors
    texts = said.decode().splitlines()
    texts.remove("그대로")
    assert texts.pop() == "뒤"
    found = [json.loads(line) for line in texts]
    assert [line["message"] for line in found[:4]] == ["봄", "warning: 가을", "여름", "["]
    assert [line.get("level") for line in found[:3]] == ["info", "warning", None]
    assert found[-1]["message"] == "끝"


def test_after_the_close_no_thread_reads_what_another_process_prints() -> None:
    """In Python's development mode such a thread kept the interpreter from ending."""
    with run("""
import subprocess
output = JsonOutput("entrypoint")
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
output.close()
print(threading.active_count(), flush=True)
other.kill()
other.communicate()
""") as process:
        said, errors = process.communicate(timeout=60)
    assert (said, errors) == (b"1\n", b"")


def test_what_does_not_fit_is_counted_where_it_is_missing() -> None:
    count = 4 * MAX_QUEUED_BYTES // LINE_BYTES
    with run(f"""
counted = []
output = JsonOutput("entrypoint", counted.append)
for number in range({count}):
    print('{{"number":%d,"text":"%s"}}' % (number, "x" * {LINE_BYTES}))
sys.stdout.flush()
os.write(output._originals[1], b"printed\\n")
sys.stdin.read(1)
print('{{"number":{count}}}', flush=True)
output.close()
print(sum(counted), file=sys.stderr)
""") as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stderr.readline() == b"printed\n"  # though the output was not read
        found = []
        while not found or "dropped" not in found[-1].get("message", ""):
            found.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        found += [json.loads(line) for line in process.stdout]
        counted = int(process.stderr.read())
    assert {line["level"] for line in found if "level" in line} == {"warning"}
    assert process.returncode == 0
    following = dropped = 0
    for line in found:
        if "number" in line:
            assert line["number"] == following
            following += 1
        else:
            dropped += (lost := int(re.findall(r"\d+", line["message"])[0]))
            following += lost
    assert following == count + 1
    assert counted == dropped > 0
