"""Starts Multi Model Server (MMS) through the SageMaker Inference Toolkit.

`python -m serving.mms.launcher` runs as long as MMS's Java process does. The toolkit searches all
processes of the machine for it and waits ten minutes. The launcher replaces this by a search of its
own session, and fails at once if Java exits during its start.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from retrying import retry

from common.oom import SERVER, expendable
from common.parent_death import end_with_server
from common.trees import remove
from common.worker_protocol import MAX_RESPONSE_BYTES
from serving.process.isolation import passed
from serving.process.json_output import JsonOutput
from serving.process.system import Processes
from serving.settings import REPOSITORY, Settings

HANDLER = "handlers.handler_service"
MMS_HOME = REPOSITORY / "handlers" / "mms_home"
EXIT_NOT_STARTED = 3
LAUNCHER_S = 5  # time limit for the exit of the process that starts Java
WORKER_GRACE_S = 15  # added to REQUEST_TIMEOUT_S, so that the gateway times out before MMS
QUEUE_SIZE = 1000  # jobs of a model in MMS; the gateway's queue is the one that limits requests
# Each registration blocks a thread, and with it the requests on 1/NETTY_THREADS of the connections.
# MMS's default is one per core: half of all requests on two cores.
NETTY_THREADS = 16
# The health check of MMS: an empty page of its list of models. MMS 1.1.11 fails to list a model
# that is unloaded at the same time, and logs an error (ManagementRequestHandler.handleListModels).
HEALTH = "/models?limit=0"
HEADROOM_BYTES = 65_536  # beyond MAX_REQUEST_BYTES, for what the gateway adds to a body

# MMS's log lines as JSON, without its access and metrics logs. The logger WorkerLifeCycle has the
# output of workers; its own messages are filtered out.
LOG_CONFIGURATION = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    <Console name="stdout" target="SYSTEM_OUT">
      <PatternLayout charset="UTF-8" alwaysWriteExceptions="false" pattern='{"time":"%d{yyyy-MM-dd&apos;T&apos;HH:mm:ss.SSS&apos;Z&apos;}{UTC}","level":"%level{lowerCase=true}","process":"mms","thread":"%t","message":"%enc{%m%notEmpty{: %throwable{short.message}}}{JSON}"}%n'/>
    </Console>
  </Appenders>
  <Loggers>
    <Logger name="io.netty" level="error"/>
    <Logger name="org.apache" level="off"/>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="MMS_METRICS" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="com.amazonaws.ml.mms.wlm.WorkerLifeCycle" level="info">
      <RegexFilter regex=".*(IOStreams\\(\\) threadName|Stopped Scanner|\\[PID\\]|MMS worker started).*" onMatch="DENY" onMismatch="NEUTRAL"/>
    </Logger>
    <Logger name="com.amazonaws.ml.mms" level="warn"/>
    <Root level="warn"><AppenderRef ref="stdout"/></Root>
  </Loggers>
</Configuration>
"""  # noqa: E501


def environment(settings: Settings, run_dir: Path) -> dict[str, str]:
    """Return the environment of the launcher, of MMS, and of its workers.

    Workers run models' code, so the server's variables are filtered by `serving.process.isolation`.
    """
    inherited = passed(os.environ, settings.worker_variables)
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    address = f"unix:{mms_socket(run_dir)}"
    return {
        **inherited,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(run_dir),
        "TEMP": str(run_dir),
        "LOG_LOCATION": str(run_dir),
        "METRICS_LOCATION": str(run_dir),
        "RUN_DIR": str(run_dir),
        "ENGINE_SOCKET": engine_socket(run_dir),
        "REQUEST_TIMEOUT_S": str(settings.request_timeout_s),
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_HANDLER": HANDLER,
        "SAGEMAKER_BASE_DIR": str(run_dir / "ml"),
        "SAGEMAKER_STARTUP_TIMEOUT": str(settings.start_timeout_s),
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": str(settings.request_timeout_s + WORKER_GRACE_S),
        "SAGEMAKER_MODEL_SERVER_VMARGS": settings.jvm_options,
        # In MMS, the environment overrides the configuration file that the toolkit writes.
        "MMS_INFERENCE_ADDRESS": address,
        "MMS_MANAGEMENT_ADDRESS": address,
        "MMS_DEFAULT_WORKERS_PER_MODEL": str(settings.requests_at_once),
        "MMS_JOB_QUEUE_SIZE": str(QUEUE_SIZE),
        "MMS_NUMBER_OF_NETTY_THREADS": str(NETTY_THREADS),
        "MMS_MAX_REQUEST_SIZE": str(settings.max_request_bytes + HEADROOM_BYTES),
        "MMS_MAX_RESPONSE_SIZE": str(MAX_RESPONSE_BYTES),
        "MMS_DECODE_INPUT_REQUEST": "false",
        "MODEL_SERVER_HOME": str(MMS_HOME),
    }


def mms_socket(run_dir: Path) -> str:
    return str(run_dir / "mms.sock")


def engine_socket(run_dir: Path) -> str:
    return str(run_dir / "engine.sock")


def remove_stale_files(run_dir: Path) -> None:
    """Remove files of a killed server; its pid file would prevent the start of MMS."""
    patterns = (".model_server.pid", "mms.sock", ".mms.sock.*", "*-stdout", "*-stderr")
    for pattern in (*patterns, "models.json", "aliases.json"):
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)
    remove(run_dir / "workers")


def _find_java(output: JsonOutput) -> psutil.Process:
    """Return MMS's Java process in this session. Raises `RuntimeError` if it is not there yet.

    Ends this process with EXIT_NOT_STARTED if the process that starts Java has exited without it.
    """
    from sagemaker_inference import model_server

    session = os.getsid(0)
    # Checked before the search: the process that starts Java may exit during it, once Java runs.
    launchers = psutil.Process().children()
    ended = all(child.status() == psutil.STATUS_ZOMBIE for child in launchers)
    for process in psutil.process_iter():
        try:
            ours = os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
            if ours and model_server.MMS_NAMESPACE in process.cmdline():
                return process
        except (psutil.Error, ProcessLookupError):
            continue
    if ended:
        print("Multi Model Server's Java process ended while it started", flush=True)
        output.close()
        os._exit(EXIT_NOT_STARTED)
    raise RuntimeError("Multi Model Server's Java process is not there yet")


def _wait_for_java(output: JsonOutput, timeout_s: int) -> psutil.Process:
    """Poll for MMS's Java process every 100 ms; the toolkit's own loop polls once a second."""
    find = retry(wait_fixed=100, stop_max_delay=timeout_s * 1000)(_find_java)
    process: psutil.Process = find(output)
    psutil.wait_procs(psutil.Process().children(), LAUNCHER_S)  # the toolkit does not reap it
    return process


def _end_session(number: int, frame: Any) -> None:
    """Kill MMS, its workers and this process, as the entrypoint has been killed."""
    Processes.signal_session(os.getpid(), signal.SIGKILL)
    os._exit(1)


class _Lazy(ModuleType):
    """A stand-in for a module, which imports the module when an attribute is used."""

    def __getattr__(self, attribute: str) -> Any:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{self.__name__}.{attribute}")
        return getattr(importlib.import_module(self.__name__), attribute)


@contextlib.contextmanager
def lazily_imported(*names: str) -> Iterator[None]:
    """Make imports of `names` in the block return stand-ins, which import the modules when used.

    The toolkit imports numpy and scipy (20 MB and 0.1 s) for formats that are not used here, and
    boto3 (0.2 s) for a package index.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Lazy(name)
    try:
        yield
    finally:
        for name in absent:
            if isinstance(sys.modules.get(name), _Lazy):
                del sys.modules[name]


def main() -> None:
    signal.signal(signal.SIGHUP, _end_session)  # Java's parent is not this process
    end_with_server(signal.SIGHUP)
    expendable(SERVER)
    output = JsonOutput("mms")  # Java and MMS print some lines without the logger
    warnings.filterwarnings("ignore", "pkg_resources is deprecated")  # the toolkit uses it
    # After a crash of Java all models wait for this process: import only what it needs.
    with lazily_imported("numpy", "scipy", "scipy.sparse", "boto3"):
        from sagemaker_inference import model_server

    run_dir = Path(os.environ["RUN_DIR"])
    model_server.MMS_CONFIG_FILE = str(run_dir / "mms.properties")
    log_configuration = run_dir / "log4j2.xml"
    log_configuration.write_text(LOG_CONFIGURATION, encoding="utf-8")
    model_server.DEFAULT_MMS_LOG_FILE = str(log_configuration)
    model_server._retry_retrieve_mms_server_process = functools.partial(_wait_for_java, output)
    try:
        model_server.start_model_server(handler_service=HANDLER)
    finally:
        output.close()


if __name__ == "__main__":
    main()
