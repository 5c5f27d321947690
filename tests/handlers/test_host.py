"""The host of the engine's models and the owners of their sockets, as MMS sees them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from handlers.dispatch import is_hosted
from handlers.host import Poller
from serving.entrypoint import takes_models
from serving.mms.launcher import MMS_HOME
from tests.e2e.server import REPOSITORY, eventually
from tests.handlers.messages import load_message, request_message
from tests.processes import has_ended, nothing_starts_in

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
import handlers.host as host
host.DISCONNECTED_TIMEOUT_S = float(sys.argv[1])
host.POLL_INTERVAL_S = min(host.DISCONNECTED_TIMEOUT_S, host.POLL_INTERVAL_S)
if sys.argv[2] != "0":
    from tests.processes import become_a_user
    become_a_user(int(sys.argv[2]))
host.main()
"""


MMS = ["/bin/sh", "-c", '"$@" & wait', "mms"]  # a parent of an owner's


class Processes:
    """A host, and owners that are started as MMS does."""

    def __init__(self, folder: Path, left_alone_s: float, user: int) -> None:
        self.folder, self._left_alone_s, self._user = folder, left_alone_s, user
        (folder / "echo.py").write_text(textwrap.dedent(ECHO))
        self._environment = {
            **os.environ,
            "RUN_DIR": str(folder),
            "PYTHONPATH": f"{REPOSITORY}:{folder}",
        }
        self._started: list[subprocess.Popen[str]] = []
        self._models: list[Model] = []
        self.host = self.start_host()

    def start_host(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOST, str(self._left_alone_s), str(self._user)]
        return self._start(command, self.folder)

    def own(self, name: str, within: Sequence[str] = ()) -> Model:
        """Starts a model's owner, below the program `within`, and waits until it listens."""
        model = self.begin(name, within)
        assert model.owner.stdout is not None
        first_line = model.owner.stdout.readline()
        assert within or first_line == f"[PID] {model.owner.pid}\n"
        assert model.owner.stdout.readline() == "MMS worker started.\n"
        return model

    def begin(self, name: str, within: Sequence[str] = (), output: int = subprocess.PIPE) -> Model:
        """Starts a model's owner."""
        slot = self.folder / name
        slot.mkdir()
        (slot / "hosted").touch()
        path = self.folder / f"{name}.sock"
        command = [sys.executable, str(MMS_HOME / "mms" / "model_service_worker.py")]
        command += ["--sock-type", "unix", "--sock-name", str(path), "--handler", "echo"]
        command += ["--model-path", str(slot), "--model-name", name, "--preload-model", "false"]
        owner = self._start([*within, *command], slot, output)
        self._models.append(Model(name, slot, path, owner))
        return self._models[-1]

    def _start(
        self, command: list[str], folder: Path, output: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=folder, env=self._environment, stdout=output, text=True
        )
        self._started.append(process)
        return process

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
        self._connections = 0
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets.append(connection)
        connection.settimeout(30)
        connection.connect(str(self.path))
        return connection

    def load(self, connection: socket.socket) -> bytes:
        self._connections += 1
        message = load_message(self.name, self.slot, "echo", f"{self.name}-{self._connections}")
        connection.sendall(message)
        return connection.recv(1 << 16)

    def ask(self, connection: socket.socket, body: bytes) -> bytes:
        connection.sendall(request_message(body))
        return connection.recv(1 << 16)

    def notes(self) -> list[str]:
        return (self.slot / "notes").read_text().split()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float], Processes]]:
    started: list[Processes] = []

    def processes(left_alone_s: float = 60.0, user: int = 0) -> Processes:
        started.append(Processes(tmp_path, left_alone_s, user))
        return started[-1]

    yield processes
    for each in started:
        each.end()


Start = Callable[..., Processes]


def test_one_host_answers_for_several_models(start: Start) -> None:
    processes = start()
    models = [processes.own("a"), processes.own("b")]
    connections = [model.connect() for model in models]
    for model, connection in zip(models, connections, strict=True):
        assert b"loaded model" in model.load(connection)
    for model, connection in zip(models, connections, strict=True):
        for _ in range(3):
            assert f"{model.name} heard 봄".encode() in model.ask(connection, "봄".encode())


def test_connections_to_one_model_share_what_it_loaded(start: Start) -> None:
    model = start().own("a")
    connections = [model.connect() for _ in range(20)]
    for connection in connections:
        model.load(connection)
    assert all(b"a heard x" in model.ask(c, b"x") for c in connections)
    for connection in connections:
        connection.close()
    eventually(
        lambda: sorted(model.notes()) == sorted(["loaded"] + 20 * ["connected", "disconnected"])
    )


def test_threads_of_many_requests_at_once_end_with_them(start: Start) -> None:
    processes = start()
    model, host = processes.own("a"), psutil.Process(processes.host.pid)
    connections = [model.connect() for _ in range(60)]
    for connection in connections:
        model.load(connection)
        connection.sendall(request_message(b"x")[:1])  # keeps one who waits for the rest
    eventually(lambda: host.num_threads() > 60)
    assert takes_models(processes.folder)
    for connection in connections:
        connection.sendall(request_message(b"x")[1:])
        assert b"a heard x" in connection.recv(1 << 16)
    eventually(lambda: host.num_threads() < 40)
    assert b"a heard x" in model.ask(connections[0], b"x")


def test_threads_that_do_not_start_delay_no_request(start: Start) -> None:
    processes = start(user=54323)
    models = [processes.own("a"), processes.own("b")]
    held, free = ([model.connect() for _ in range(10)] for model in models)
    for model, connections in zip(models, (held, free), strict=True):
        for connection in connections:
            assert b"loaded model" in model.load(connection)
    with nothing_starts_in(processes.host.pid):
        for connection in held:
            connection.sendall(request_message(b"x")[:1])  # keeps a thread that waits for the rest
        for _ in range(3):
            for connection in free:
                assert "b heard 봄".encode() in models[1].ask(connection, "봄".encode())
        for connection in held:
            connection.sendall(request_message(b"x")[1:])
            assert b"a heard x" in connection.recv(1 << 16)


def test_more_requests_than_threads_can_start_are_answered_once_they_can(start: Start) -> None:
    processes = start(user=54324)
    model = processes.own("a")
    connections = [model.connect() for _ in range(40)]
    for connection in connections:
        assert b"loaded model" in model.load(connection)
    host = psutil.Process(processes.host.pid)
    with nothing_starts_in(host.pid):
        for connection in connections:
            connection.sendall(request_message(b"x")[:1])
        assert processes.host.stdout is not None
        assert any("can't start new thread" in line for line in processes.host.stdout)
    eventually(lambda: host.num_threads() > len(connections))  # also without another message
    for connection in connections:
        connection.sendall(request_message(b"x")[1:])
        assert b"a heard x" in connection.recv(1 << 16)


def test_messages_are_answered_however_they_arrive(start: Start) -> None:
    model = start().own("a")
    connection = model.connect()
    model.load(connection)
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
    assert b"a heard x" in model.ask(connection, b"x")


def test_a_failed_request_does_not_close_its_connection(start: Start) -> None:
    model = start().own("a")
    connection = model.connect()
    model.load(connection)
    assert b"Prediction failed" in model.ask(connection, b"fail")
    assert b"a heard x" in model.ask(connection, b"x")


def test_a_model_ends_with_its_owner(start: Start) -> None:
    processes = start()
    killed, other = processes.own("a"), processes.own("b")
    connection, other_connection = killed.connect(), other.connect()
    killed.load(connection)
    other.load(other_connection)
    killed.owner.kill()
    assert connection.recv(1) == b""  # MMS sees its worker end
    eventually(lambda: "closed" in killed.notes())
    with pytest.raises(ConnectionRefusedError):
        killed.connect()
    assert b"b heard x" in other.ask(other_connection, b"x")
    assert "closed" not in other.notes()


def test_owners_that_end_at_once_affect_no_other_model(start: Start) -> None:
    processes = start()
    before = processes.own("b")
    assert b"loaded model" in before.load(before.connect())
    for _ in range(500):
        with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as listener:
            owner.connect(str(processes.folder / "workers.sock"))
            listener.bind("")
            listener.listen()
            socket.send_fds(owner, [b"."], [listener.fileno()])
    model = processes.own("a")
    assert b"loaded model" in model.load(model.connect())


def test_an_owner_that_sends_no_socket_delays_no_other(start: Start) -> None:
    processes = start()
    eventually(lambda: takes_models(processes.folder))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(processes.folder / "workers.sock"))
        model = processes.own("a")
        assert b"loaded model" in model.load(model.connect())
        assert silent.recv(1) == b""


def test_a_stopped_host_takes_no_models(start: Start) -> None:
    processes = start()
    eventually(lambda: takes_models(processes.folder))
    processes.host.send_signal(signal.SIGSTOP)
    assert not takes_models(processes.folder)
    processes.host.kill()
    processes.host.wait()
    assert not takes_models(processes.folder)


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
    model = start(left_alone_s=0.2).own("a")
    connection = model.connect()
    model.load(connection)
    connection.close()
    assert model.owner.wait(30) == 0
    assert not model.path.exists()
    eventually(lambda: "closed" in model.notes())


def test_the_next_host_takes_over_what_a_killed_one_had(start: Start) -> None:
    processes = start()
    model = processes.own("a")
    before = model.connect()
    model.load(before)
    processes.host.send_signal(signal.SIGKILL)
    assert before.recv(1) == b""
    after = model.connect()  # before the next one is there
    processes.start_host()
    assert b"loaded model" in model.load(after)
    assert b"a heard x" in model.ask(after, b"x")


@pytest.mark.parametrize("had_a_host", [False, True])
def test_an_owner_without_a_host_ends_with_multi_model_server(
    start: Start, had_a_host: bool
) -> None:
    processes = start()
    if not had_a_host:
        processes.host.kill()
        processes.host.wait()
    model = processes.own("a", within=MMS)
    if had_a_host:
        assert b"loaded model" in model.load(model.connect())
        processes.host.send_signal(signal.SIGSTOP)  # so that it does not react to the owner's end
    (owner,) = eventually(psutil.Process(model.owner.pid).children)
    model.owner.kill()
    processes.host.kill()
    eventually(lambda: has_ended(owner))
    assert not model.path.exists()


def test_an_owner_that_cannot_print_ends_with_multi_model_server(start: Start) -> None:
    processes = start()
    processes.host.kill()
    processes.host.wait()
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
    assert b"loaded model" in model.load(model.connect())
    owner = psutil.Process(model.owner.pid)
    eventually(lambda: owner.name() == "sh")
    assert owner.memory_full_info().uss < 1 << 20
    assert "model_service_worker" in " ".join(owner.cmdline())


def test_only_models_of_the_engine_are_hosted(tmp_path: Path) -> None:
    text, script, graph = (tmp_path / name for name in ("글", "script", "graph"))
    for folder in (text, script / "code", graph):
        folder.mkdir(parents=True)
    (text / "m.params").touch()
    (text / "m.spiece").touch()
    (script / "m.params").touch()
    (script / "code" / "inference.py").write_text("def model_fn(model_dir): ...")
    (graph / "model.onnx").touch()
    assert [is_hosted(folder) for folder in (text, script, graph)] == [True, False, False]
    assert not is_hosted(text, "module:function")
