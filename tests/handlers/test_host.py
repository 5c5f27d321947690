"""The host of the engine's models and the owners of their sockets, as MMS sees them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from handlers.dispatch import built_in, is_hosted
from handlers.mms_server import Poller
from handlers.tensors.files import SYMBOL
from serving.mms.launcher import MMS_HOME
from serving.server import host_accepts
from tests.e2e.server import REPOSITORY, eventually
from tests.handlers.messages import ask, load_message, request_message, worker_arguments
from tests.processes import has_ended, no_files_in, nothing_starts_in

# A handler service that logs its calls in a file.
ECHO = """
    import os

    class Echo:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
            self.note("loaded")

        def handle(self, data, context):
            if data[0]["body"] == b"fail":
                raise SystemError("wrong")
            return [f"{os.path.basename(self.folder)} heard ".encode() + bytes(data[0]["body"])]

        def connected(self):
            self.note("connected")

        def disconnected(self):
            self.note("disconnected")

        def close(self):
            self.note("closed")

        def note(self, what):
            with open(f"{self.folder}/notes", "a") as notes:
                notes.write(what + "\\n")
"""
HOST = """
import sys
import handlers.host as host, handlers.mms_server as mms
mms.DISCONNECTED_TIMEOUT_S = float(sys.argv[1])
host.POLL_INTERVAL_S = min(mms.DISCONNECTED_TIMEOUT_S, host.POLL_INTERVAL_S)
if sys.argv[2] != "0":
    from tests.processes import become_a_user
    become_a_user(int(sys.argv[2]))
host.main()
"""
MMS = ["/bin/sh", "-c", '"$@" & wait', "mms"]  # a parent of an owner
REQUEST = request_message(b"x")


class Processes:
    """A host, and owners that are started as MMS does."""

    def __init__(self, folder: Path, disconnected_s: float, user: int) -> None:
        self.folder, self._options = folder, [str(disconnected_s), str(user)]
        (folder / "echo.py").write_text(textwrap.dedent(ECHO))
        python_path = f"{REPOSITORY}:{folder}"
        self._environment = {**os.environ, "RUN_DIR": str(folder), "PYTHONPATH": python_path}
        self._started: list[subprocess.Popen[str]] = []
        self._models: list[Model] = []
        self.host = self.start_host()

    def start_host(self) -> subprocess.Popen[str]:
        return self._start([sys.executable, "-c", HOST, *self._options], self.folder)

    def end_host(self) -> None:
        self.host.kill()
        self.host.wait()

    def own(self, name: str, within: Sequence[str] = ()) -> Model:
        """Starts a model's owner, below the program `within`, and waits until it listens."""
        model = self.begin(name, within)
        output = model.owner.stdout
        assert output is not None
        first_line = output.readline()
        assert within or first_line == f"[PID] {model.owner.pid}\n"
        assert output.readline() == "MMS worker started.\n"
        return model

    def begin(self, name: str, within: Sequence[str] = (), output: int = subprocess.PIPE) -> Model:
        """Starts a model's owner."""
        slot, path = self.folder / name, self.folder / f"{name}.sock"
        slot.mkdir()
        (slot / "hosted").touch()
        program = str(MMS_HOME / "mms" / "model_service_worker.py")
        arguments = worker_arguments(path, name, slot, "echo")
        owner = self._start([*within, sys.executable, program, *arguments], slot, output)
        self._models.append(Model(name, slot, path, owner))
        return self._models[-1]

    def _start(
        self, command: list[str], folder: Path, output: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        environment = self._environment
        self._started.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, text=True)
        )
        return self._started[-1]

    def end(self) -> None:
        for model in self._models:
            for connection in model.sockets:
                connection.close()
        for process in self._started:
            process.kill()
            with process:  # not until its output ends: what it has started may live
                pass


class Model:
    def __init__(self, name: str, slot: Path, path: Path, owner: subprocess.Popen[str]) -> None:
        self.name, self.slot, self.path, self.owner = name, slot, path, owner
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets.append(connection)
        connection.settimeout(30)
        connection.connect(str(self.path))
        return connection

    def load(self, connection: socket.socket) -> None:
        io_name = f"{self.name}-{self.sockets.index(connection)}"
        assert b"loaded model" in ask(
            connection, load_message(self.name, self.slot, "echo", io_name)
        )

    def loaded(self, count: int = 1) -> list[socket.socket]:
        """Open a number of connections on which the model is loaded."""
        connections = [self.connect() for _ in range(count)]
        for connection in connections:
            self.load(connection)
        return connections

    def answers(self, connection: socket.socket, body: str = "x") -> bool:
        answer = ask(connection, request_message(body.encode()))
        return f"{self.name} heard {body}".encode() in answer

    def notes(self) -> list[str]:
        return (self.slot / "notes").read_text().split()


def answers_the_rest(connections: list[socket.socket]) -> bool:
    """Whether requests are answered whose first byte was sent before."""
    return all(b"a heard x" in ask(connection, REQUEST[1:]) for connection in connections)


Start = Callable[..., Processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Processes] = []

    def processes(disconnected_s: float = 60.0, user: int = 0) -> Processes:
        started.append(Processes(tmp_path, disconnected_s, user))
        return started[-1]

    yield processes
    for each in started:
        each.end()


def test_one_host_answers_for_several_models_each_loaded_once(start: Start) -> None:
    processes = start()
    models = [processes.own("a"), processes.own("b")]
    connections = {model.name: model.loaded(20) for model in models}
    for model in models:
        for connection in connections[model.name]:
            assert b"Prediction failed" in ask(connection, request_message(b"fail"))
            assert model.answers(connection, "봄")
    for connection in connections["a"]:
        connection.close()
    calls = sorted(["loaded"] + 20 * ["connected", "disconnected"])
    eventually(lambda: sorted(models[0].notes()) == calls)


def test_threads_of_many_requests_at_once_end_with_them(start: Start) -> None:
    processes = start()
    model, host = processes.own("a"), psutil.Process(processes.host.pid)
    connections = model.loaded(60)
    for connection in connections:
        connection.sendall(REQUEST[:1])  # keeps a thread that waits for the rest
    eventually(lambda: host.num_threads() > 60)
    assert host_accepts(processes.folder)
    assert answers_the_rest(connections)
    eventually(lambda: host.num_threads() < 40)
    assert model.answers(connections[0])


def test_threads_that_do_not_start_delay_no_request(start: Start) -> None:
    processes = start(user=54323)
    held, free = processes.own("a"), processes.own("b")
    waiting, answered = held.loaded(10), free.loaded(10)
    with nothing_starts_in(processes.host.pid):
        for connection in waiting:
            connection.sendall(REQUEST[:1])
        for _ in range(3):
            assert all(free.answers(connection, "봄") for connection in answered)
        assert answers_the_rest(waiting)


def test_more_requests_than_threads_can_start_are_answered_once_they_can(start: Start) -> None:
    processes = start(user=54324)
    connections = processes.own("a").loaded(40)
    host = psutil.Process(processes.host.pid)
    with nothing_starts_in(host.pid):
        for connection in connections:
            connection.sendall(REQUEST[:1])
        assert processes.host.stdout is not None
        assert any("can't start new thread" in line for line in processes.host.stdout)
    eventually(lambda: host.num_threads() > len(connections))  # also without another message
    assert answers_the_rest(connections)


def test_a_host_without_descriptors_keeps_its_models_and_takes_others_later(start: Start) -> None:
    processes = start()
    model = processes.own("a")
    (connection,) = model.loaded()
    with no_files_in(processes.host.pid):
        owner = processes.begin("b")
        assert processes.host.stdout is not None
        assert any("a model's owner waits: Too many" in line for line in processes.host.stdout)
        assert model.answers(connection, "봄")
    owner.loaded()
    assert model.answers(connection, "봄")


def test_a_model_without_descriptors_is_reached_once_there_are_some(start: Start) -> None:
    processes = start()
    model = processes.own("a")
    (connection,) = model.loaded()
    with no_files_in(processes.host.pid):
        later = model.connect()
        assert processes.host.stdout is not None
        assert any("a connection of Multi" in line for line in processes.host.stdout)
        assert model.answers(connection, "봄")
    model.load(later)
    assert model.answers(later, "봄")


def test_a_host_may_open_as_many_files_as_the_hard_limit(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        processes = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    processes.own("a").loaded()
    host = processes.host.pid
    assert resource.prlimit(host, resource.RLIMIT_NOFILE) == (hard, hard)


def test_messages_are_answered_however_they_arrive(start: Start) -> None:
    model = start().own("a")
    (connection,) = model.loaded()
    for byte in request_message("봄".encode()):
        connection.sendall(bytes([byte]))
    assert "a heard 봄".encode() in connection.recv(1 << 16)
    large = b"x" * 300_000
    connection.sendall(request_message(b"1") + request_message(large) + request_message(b"3"))
    expected = [b"a heard 1", b"a heard " + large, b"a heard 3"]
    answers = b""
    while any(answer not in answers for answer in expected):
        more = connection.recv(1 << 16)
        assert more
        answers += more
    assert model.answers(connection)


def test_a_model_ends_with_its_owner_and_no_other_does(start: Start) -> None:
    processes = start()
    killed, other = processes.own("a"), processes.own("b")
    (connection,), (other_connection,) = killed.loaded(), other.loaded()
    killed.owner.kill()
    assert connection.recv(1) == b""  # MMS sees its worker end
    eventually(lambda: "closed" in killed.notes())
    with pytest.raises(ConnectionRefusedError):
        killed.connect()
    assert other.answers(other_connection)
    assert "closed" not in other.notes()


def test_owners_that_end_at_once_or_send_no_socket_affect_no_other_model(start: Start) -> None:
    processes = start()
    processes.own("b").loaded()
    for _ in range(500):
        with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as listener:
            owner.connect(str(processes.folder / "workers.sock"))
            listener.bind("")
            listener.listen()
            socket.send_fds(owner, [b"."], [listener.fileno()])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(processes.folder / "workers.sock"))
        processes.own("a").loaded()
        assert silent.recv(1) == b""


def test_a_stopped_host_takes_no_models(start: Start) -> None:
    processes = start()
    eventually(lambda: host_accepts(processes.folder))
    processes.host.send_signal(signal.SIGSTOP)
    assert not host_accepts(processes.folder)
    processes.end_host()
    assert not host_accepts(processes.folder)


def test_a_socket_is_polled_again_after_an_error() -> None:
    poller, received = Poller(), []

    def read() -> bool:
        received.append(there.recv(1))
        if len(received) == 1:
            raise ValueError("unexpected")
        return False

    here, there = socket.socketpair()
    with here, there:
        poller.add(there, read)
        here.send(b"ab")
        with pytest.raises(ValueError, match="unexpected"):
            poller.read_next(lambda: None)
        poller.read_next(lambda: None)
    assert received == [b"a", b"b"]


def test_the_owner_of_an_unregistered_model_ends(start: Start) -> None:
    model = start(disconnected_s=0.2).own("a")
    model.loaded()[0].close()
    assert model.owner.wait(30) == 0
    assert not model.path.exists()
    eventually(lambda: "closed" in model.notes())


def test_the_next_host_takes_over_the_models_of_a_killed_one(start: Start) -> None:
    processes = start()
    model = processes.own("a")
    (before,) = model.loaded()
    processes.host.send_signal(signal.SIGKILL)
    assert before.recv(1) == b""
    after = model.connect()  # before the next one is there
    processes.start_host()
    model.load(after)
    assert model.answers(after)


@pytest.mark.parametrize("had_a_host", [False, True])
def test_an_owner_without_a_host_ends_with_multi_model_server(
    start: Start, had_a_host: bool
) -> None:
    processes = start()
    if not had_a_host:
        processes.end_host()
    model = processes.own("a", within=MMS)
    if had_a_host:
        model.loaded()
        processes.host.send_signal(signal.SIGSTOP)  # so that it does not react to the owner's end
    (owner,) = eventually(psutil.Process(model.owner.pid).children)
    model.owner.kill()
    processes.host.kill()
    eventually(lambda: has_ended(owner))
    assert not model.path.exists()


def test_an_owner_that_cannot_print_ends_with_multi_model_server(start: Start) -> None:
    processes = start()
    processes.end_host()
    reader, writer = os.pipe()
    with open(reader, "rb") as output:
        with open(writer, "wb", buffering=0) as full:
            os.set_blocking(writer, False)
            while full.write(b"." * 4096):
                pass
            os.set_blocking(writer, True)
            model = processes.begin("a", MMS, writer)
        eventually(model.path.exists)
        (owner,) = psutil.Process(model.owner.pid).children()
        model.owner.kill()
        model.owner.wait()
        output.read()
    eventually(lambda: has_ended(owner))


def test_an_owner_whose_model_is_hosted_takes_no_memory(start: Start) -> None:
    model = start().own("a")
    model.loaded()
    owner = psutil.Process(model.owner.pid)
    eventually(lambda: owner.name() == "sh")
    assert owner.memory_full_info().uss < 1 << 20
    assert "model_service_worker" in " ".join(owner.cmdline())


def test_only_models_of_the_engine_are_hosted(tmp_path: Path) -> None:
    for file in (
        "글/m.params", "글/m.spiece", "script/m.params", "graph/model.onnx", f"symbol/{SYMBOL}",
    ):  # fmt: skip
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "script" / "inference.py").write_text("def model_fn(model_dir): ...")
    hosted = [name for name in ("글", "script", "graph", "symbol") if is_hosted(tmp_path / name)]
    assert hosted == ["글"]
    assert not is_hosted(tmp_path / "글", "module:function")
    for name in ("글", "graph", "symbol"):
        assert (name in hosted) == built_in(str(tmp_path / name)).IN_ENGINE
