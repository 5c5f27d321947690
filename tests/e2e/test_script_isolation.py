"""A model's own script can do anything and hurts only its own model; who asks learns why."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from common import landlock
from handlers.user_code.output import BURST_BYTES, BYTES_PER_S
from tests.e2e.scripts import script, transform
from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, error, serving, small, text
from tests.processes import has_ended

pytestmark = pytest.mark.slow

SECRETS = {"AWS_SECRET_ACCESS_KEY": "SECRET-1", "MANAGEMENT_TOKEN": "", "HF_TOKEN": "SECRET-2"}
SECRETS |= {"ORDERS_PASSWORD": "SECRET-3", "ORDERS_URL": "postgres://me:SECRET-4@db/orders"}
MEMORY_MIB = 512
WORKER, CHILD = "model_service_worker", "user_code/child.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isolation") / "store"
    small(folder / "good")
    transform(folder / "echo", "return body, content_type")
    return folder


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {**SECRETS, "SCRIPT_MEMORY_MIB": str(MEMORY_MIB)}
    environment |= {"WORKER_VARIABLES": "POEM_*", "POEM_STYLE": "시조"}
    with serving(tmp_path_factory.mktemp("server"), store, **environment) as running:
        for name in ("good", "echo"):
            assert running.load(name).status_code == 200
        yield running


@pytest.fixture(scope="module")
def good(server: Server) -> tuple[set[int], str]:
    """The workers of the other models, and the answer of one of them."""
    pids = {p.pid for p in server.descendants(WORKER) + server.descendants("ModelServer")}
    return pids, text(server.predict("good", SHORT))


@pytest.fixture(autouse=True)
def others(server: Server, good: tuple[set[int], str]) -> Iterator[None]:
    """The models beside keep their workers, and answer as before."""
    yield
    pids, expected = good
    assert pids <= {p.pid for p in server.descendants()}
    assert text(server.predict("good", SHORT)) == expected
    assert server.predict("echo", "봄").json() == "봄"
    assert server.is_ready()


def failed(answer: requests.Response, status: int, reason: str) -> None:
    """The script failed with an error of one line, which reveals nothing of the server."""
    assert error(answer)[0] == status, answer.text
    said = answer.json()["message"]
    assert reason in said
    assert "\n" not in said
    assert "File " not in said


# Loads

INITIALIZES = """
    class Service:
        def initialize(self, context): raise OSError("가중치가 없습니다")
        def handle(self, data, context): return data
"""


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        (INITIALIZES, 500, "raised OSError: 가중치가 없습니다"),
        ("import ctypes; ctypes.string_at(0)", 500, "killed by SIGSEGV while it was loaded"),
        ("import os; os.kill(os.getpid(), 9)", 507, "most likely for lack of memory"),
        ("x = 1", 400, "Please provide a model_fn implementation (or load_model and predict"),
    ],
)
def test_a_load_that_fails_says_why_and_leaves_nothing(
    server: Server, store: Path, source: str, status: int, reason: str
) -> None:
    script(store / "bad", source)
    before = len(server.descendants(CHILD))
    failed(server.load("bad"), status, reason)
    # A call that may load it says the same, and no other model had to make room.
    failed(server.predict("bad", SHORT), status, reason)
    assert set(server.loaded()) == {"good", "echo"}
    eventually(lambda: len(server.descendants(CHILD)) == before)
    transform(store / "bad", "return 'well'")
    assert server.load("bad").status_code == 200
    assert server.predict("bad", SHORT).text == "well"
    assert server.unload("bad").status_code == 200


# Requests


@pytest.fixture(scope="module")
def wild(server: Server, store: Path) -> str:
    """A model that does what its request says; it counts how many requests it has had."""
    transform(
        store / "wild",
        """
        state["count"] += 1
        exec(body, globals())
        return json.dumps(state), accept
        """,
        top="import ctypes, json, locale, os, sys, time\nstate = {'count': 0}",
    )
    assert server.load("wild").status_code == 200
    return "wild"


def count(server: Server, name: str) -> int:
    answer = server.predict(name, b"pass")
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["count"]
    return found


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("raise ValueError('값이 틀림')", 500, "raised ValueError: 값이 틀림"),
        ("x = [bytearray(1 << 20) for _ in range(5000)]", 507, "ran out of memory"),
        ("import mmap; x = mmap.mmap(-1, 1 << 20)", 500, "raised PermissionError"),
        ("x = os.memfd_create('x')", 500, "raised PermissionError"),
        ("open('/dev/shm/글', 'w')", 500, "raised PermissionError"),
    ],
)
def test_an_exception_ends_the_request_and_not_the_process(
    server: Server, wild: str, code: str, status: int, reason: str
) -> None:
    before = count(server, wild)
    failed(server.predict(wild, code.encode()), status, reason)
    assert count(server, wild) == before + 2


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("ctypes.string_at(0)", 500, "killed by SIGSEGV while it answered"),
        # The news of its death comes before what it has forked ends.
        ("os.fork() or time.sleep(50)\nctypes.string_at(0)", 500, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", 507, "most likely for lack of memory"),
        ("os._exit(0)", 500, "ended its process while it answered (status 0)"),
        (
            "os.closerange(3, 64); time.sleep(60)",
            500,
            "closed its connection while it answered",
        ),
    ],
)
def test_a_process_that_dies_is_started_again_at_once(
    server: Server, wild: str, code: str, status: int, reason: str
) -> None:
    count(server, wild)
    workers = {p.pid for p in server.descendants("--sock-name")}
    children = len(server.descendants(CHILD))
    failed(server.predict(wild, code.encode()), status, reason)
    assert count(server, wild) == 1  # a new process
    assert {p.pid for p in server.descendants("--sock-name")} == workers  # MMS did not wait
    eventually(
        lambda: len(server.descendants(CHILD)) <= children
    )  # one before may have been ending


def test_one_that_dies_while_nobody_asks_is_not_noticed(server: Server, wild: str) -> None:
    pid = server.predict(wild, b"state['pid'] = os.getpid()").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(pid))
    assert count(server, wild) == 1


# Leaves its session and its parent behind, as a daemon does.
DAEMON = """
import os, subprocess
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
    os._exit(0)
os.wait()
"""


def daemon(seconds: int) -> str:
    return DAEMON.format(seconds=seconds)


def test_a_daemon_that_it_has_started_goes_with_it(server: Server, wild: str) -> None:
    """A script that hangs is restarted, with its time limit."""
    assert server.load("brief", wild, response_timeout=10).status_code == 200
    assert server.predict("brief", daemon(9871).encode()).status_code == 200
    assert server.descendants("sleep", "9871")  # it lives as long as the script
    failed(server.predict("brief", b"time.sleep(1000)"), 504, "answer within 10 s")
    eventually(lambda: not server.descendants("sleep", "9871"))
    assert count(server, "brief") == 1  # a new process
    assert server.unload("brief").status_code == 200


def test_a_daemon_goes_with_the_worker_of_its_model_which_comes_back(
    server: Server, store: Path
) -> None:
    transform(store / "daemon", "return 'x'", top=daemon(9873))
    assert server.load("daemon").status_code == 200
    (before,) = server.descendants("sleep", "9873")
    parent = before.parent()
    assert parent is not None
    assert parent.pid != server.process.pid
    parent.kill()
    eventually(lambda: not before.is_running())
    eventually(lambda: server.predict("daemon", SHORT).status_code == 200)
    assert server.unload("daemon").status_code == 200
    eventually(lambda: not server.descendants("sleep", "9873"))


def hanging_pip(model: Path, backend: str) -> None:
    """A model whose requirements run this source while they are built, and need no network."""
    transform(model, "return 'x'")
    (model / "source").mkdir(exist_ok=True)
    (model / "source" / "pyproject.toml").write_text(
        "[project]\nname = 'hangs'\nversion = '1'\n"
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (model / "source" / "backend.py").write_text(backend + "\nimport time\ntime.sleep(1000)\n")
    (model / "requirements.txt").write_text("--no-index\n./source\n")


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is no model's."""
    file = tmp_path_factory.mktemp("dictionary") / "사전"
    file.write_text("봄")
    return file


@pytest.fixture(scope="module")
def allowing(
    store: Path, dictionary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that installs what models require, shows scripts a folder and no network, and waits
    for nothing for long."""
    settings = {"ALLOW_MODEL_REQUIREMENTS": "true", "LOAD_TIMEOUT_S": "20", "DRAIN_S": "2"}
    settings |= {"SCRIPT_PATHS": str(dictionary.parent), "SCRIPT_NETWORK": "false"}
    with serving(tmp_path_factory.mktemp("allowing"), store, **settings) as running:
        yield running


READS_AND_CONNECTS = """
import socket, subprocess, sys
network = "offline"
for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
    try:
        socket.socket(getattr(socket, family)).close()
        network = "online"
    except OSError:
        pass
if not subprocess.run([sys.executable, "-c", "import socket; socket.socket()"]).returncode:
    network = "online"
return open(body).read() + network
"""


def read_and_connect(server: Server, store: Path, file: Path) -> requests.Response:
    transform(store / "reader", READS_AND_CONNECTS)
    assert server.load("reader").status_code == 200
    answer = server.predict("reader", str(file).encode())
    assert server.unload("reader").status_code == 200
    return answer


def test_isolation_can_be_widened_and_scripts_be_without_the_network_which_pip_keeps(
    allowing: Server, store: Path, dictionary: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert read_and_connect(allowing, store, dictionary).text == "봄offline"
        listener.settimeout(60)
        asks = f"import socket; socket.create_connection({listener.getsockname()!r})\nraise OSError"
        hanging_pip(store / "asks", asks)
        assert error(allowing.load("asks"))[0] == 400
        listener.accept()[0].close()


def test_loads_that_never_end_are_given_up_with_all_that_they_have_started(
    allowing: Server, store: Path
) -> None:
    script(store / "endless", "import time\ntime.sleep(1000)")
    hanging_pip(store / "hangs", daemon(9874))
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(allowing.load, name) for name in ("hangs", "endless")]
        eventually(lambda: allowing.descendants("sleep", "9874"))
        assert [error(answer.result())[0] for answer in answers] == [504, 504]
    for words in (("sleep", "9874"), ("pip_child",), (CHILD,)):
        eventually(lambda words=words: not allowing.descendants(*words))
    assert allowing.load("echo").status_code == 200


def test_a_script_that_will_not_end_does_not_hold_up_a_stop(allowing: Server, store: Path) -> None:
    """Neither does a fetch that hangs."""
    deaf = "import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    asked = "subprocess.Popen(['sleep', '9876'])\nwhile True: time.sleep(1)"
    transform(store / "deaf", asked, top=deaf)
    hanging_pip(store / "hangs", deaf + daemon(9875))
    os.mkfifo(small(store / "pipe") / "generation.json")
    assert allowing.load("deaf").status_code == 200
    with ThreadPoolExecutor(3) as pool:
        pool.submit(allowing.load, "hangs")
        pool.submit(allowing.load, "pipe")
        pool.submit(allowing.predict, "deaf", SHORT)
        eventually(lambda: allowing.descendants("sleep", "9875"))
        eventually(lambda: allowing.descendants("sleep", "9876"))
        below = allowing.descendants()
        assert allowing.stop() == 0
        assert not [p for p in below if not has_ended(p)]


def test_a_script_around_the_built_in_model_reaches_no_other(server: Server, store: Path) -> None:
    small(store / "around")
    source = """
        import json, os, socket
        def transform_fn(model, body, content_type, accept):
            try:
                socket.socket(socket.AF_UNIX)
            except PermissionError:
                body = json.loads(body)
                answer = model.generate(body["inputs"], body["parameters"], 30)
                return json.dumps(answer, ensure_ascii=False), "application/json"
            return "reached"
    """
    script(store / "around", source)
    assert server.load("around").status_code == 200
    said = server.predict("around", SHORT)
    assert said.status_code == 200
    assert said.json()["completions"][0]["text"] == text(server.predict("good", SHORT))
    assert server.unload("around").status_code == 200


def test_scripts_go_first_when_memory_runs_out_and_the_engine_last(server: Server) -> None:
    def score(word: str) -> int:
        (found,) = {
            int(Path(f"/proc/{p.pid}/oom_score_adj").read_text()) for p in server.descendants(word)
        }
        return found

    words = (CHILD, "handlers.worker", "serving.gateway", "-m engine ")
    found = [score(word) for word in words]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert score("ModelServer") == score("serving.gateway") == score("handlers.host")


def test_requests_that_wait_behind_a_death_are_all_answered(server: Server, wild: str) -> None:
    codes = [b"ctypes.string_at(0)", *[b"pass"] * 5] * 4
    with ThreadPoolExecutor(len(codes)) as pool:
        answers = list(pool.map(lambda code: server.predict(wild, code), codes))
    found = [answer.status_code for answer in answers]
    assert found.count(500) == 4
    assert found.count(200) == 20


def test_megabytes_of_output_stop_nothing_and_flood_no_log(server: Server, wild: str) -> None:
    before, began = len(server.log.read_bytes()), time.monotonic()
    assert server.load("loud", wild).status_code == 200  # with all the time it needs
    for code in (
        "print('\x85\u2028\u2029' * 300_000)",  # line ends of Java
        "print('가' * 10_000_000)",
        "for i in range(60_000): print('줄', i)",
        "sys.stdout.buffer.write(b'\\xff\\xfe\\n')",
    ):
        assert server.predict("loud", code.encode()).status_code == 200
    assert server.predict("loud", "print('안녕하세요')".encode()).status_code == 200
    eventually(lambda: "of output were dropped" in server.text())
    assert server.unload("loud").status_code == 200
    most = BURST_BYTES + (time.monotonic() - began) * BYTES_PER_S
    added = server.log.read_bytes()[before:].splitlines(keepends=True)
    logged = sum(len(line) for line in added if b'-stdout","message":' in line)
    assert BURST_BYTES / 2 < logged < most


def test_a_locale_is_its_own(server: Server, wild: str) -> None:
    code = "locale.setlocale(locale.LC_ALL, 'C'); os.environ['LC_ALL'] = 'C'; os.chdir('/')"
    assert server.predict(wild, code.encode()).status_code == 200
    number = {"inputs": "나는", "parameters": {"temperature": 0.5, "seed": 1, "max_new_tokens": 2}}
    assert server.predict("good", number).status_code == 200


def test_a_script_finds_no_credentials(server: Server, wild: str) -> None:
    code = "state['environment'] = dict(os.environ)"
    found = json.dumps(server.predict(wild, code.encode()).json()["environment"])
    assert "SECRET" not in found
    assert "SM_MODEL_DIR" in found
    assert json.loads(found)["POEM_STYLE"] == "시조"


def test_a_script_reaches_nothing_of_the_server_or_of_other_models(
    server: Server, store: Path, wild: str
) -> None:
    """All that it could try: handlers/user_code/confinement/test_rules.py."""
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    (store.parent / ".aws").mkdir(exist_ok=True)
    (store.parent / ".aws" / "credentials").write_text("aws_secret_access_key = 비밀")
    gateway = server.descendants("serving.gateway")[0].pid
    worker = server.descendants(WORKER)[0].pid
    codes = [
        "import socket; socket.socket(socket.AF_UNIX)",
        f"open('/proc/{gateway}/environ', 'rb').read()",
        f"os.readlink('/proc/{gateway}/fd/0')",
        f"os.listdir('/proc/{gateway}/root/root')",
        f"open('/proc/{worker}/environ', 'rb').read()",
        f"open('{store}/../.aws/credentials').read()",
        f"open('{store}/echo/inference.py').read()",
        f"open('{store}/wild/inference.py', 'a')",
        f"open('{server.run_dir}/models.json').read()",
        "import pathlib; os.listdir(pathlib.Path(os.environ['TMPDIR']).parents[1])",
    ]
    if landlock.abi() >= landlock.SCOPES_ABI or os.geteuid() == 0:  # knows scopes of signals
        codes.append(f"os.kill({gateway}, 0)")
    for code in codes:
        failed(server.predict(wild, code.encode()), 500, "PermissionError")


def test_a_script_has_a_temporary_folder_of_its_own_that_goes_with_the_model(
    server: Server, store: Path
) -> None:
    source = "import pathlib, tempfile\nfolder = tempfile.mkdtemp()"
    source += "\npathlib.Path('~/.봄').expanduser().write_text('봄', encoding='utf-8')"
    transform(store / "writes", "return folder", top=source)
    assert server.load("writes").status_code == 200
    folder = Path(server.predict("writes", SHORT).text)
    assert folder.is_dir()
    assert server.unload("writes").status_code == 200
    assert not folder.exists()


def test_a_script_reads_no_other_file(server: Server, store: Path, dictionary: Path) -> None:
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    failed(read_and_connect(server, store, dictionary), 500, "PermissionError")


def test_isolation_can_be_turned_off_and_pip_finds_only_what_it_needs(
    store: Path, dictionary: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.json"
    seen.touch()
    seen.chmod(0o666)
    backend = (
        f"import json, os\njson.dump(dict(os.environ), open({str(seen)!r}, 'w'))\nraise OSError"
    )
    hanging_pip(store / "looks", backend)
    settings = {"ALLOW_MODEL_REQUIREMENTS": "true", "SCRIPT_ISOLATION": "false"}
    settings |= {"WORKER_VARIABLES": "나의_비밀", "나의_비밀": "SECRET-9", "PIP_TIMEOUT": "7"}
    with serving(tmp_path / "own", store, **settings, NO_PROXY="127.0.0.1") as asked:
        assert read_and_connect(asked, store, dictionary).text == "봄online"
        assert error(asked.load("looks"))[0] == 400
    found = json.loads(seen.read_text("utf-8"))
    assert (found["PIP_TIMEOUT"], found["NO_PROXY"]) == ("7", "127.0.0.1")
    assert found["PATH"]
    assert found["HOME"] == found["TMPDIR"]
    others = ("PROBE_SECRET", "RUN_DIR", "나의", "ENGINE_", "MMS_", "MODEL_SERVER_", "SAGEMAKER_")
    assert [name for name in found if name.startswith(others)] == []
