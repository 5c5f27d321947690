"""The program that Multi Model Server starts for each model, in place of its own worker.

MMS runs `$MODEL_SERVER_HOME/mms/model_service_worker.py`. For a model in the engine this program is
the owner: it listens on the socket that MMS connects to, sends the socket to the host
(`handlers.host`), and becomes a waiting shell, of 0.1 MB instead of Python's 3. For any other model
it becomes a worker (`handlers.worker`). It imports built-in modules only, to save memory.
"""

import posix
import sys
import time

RETRY_S = 0.05
# Reads the host's connection: a line means that MMS has unregistered the model; an end without a
# line, that the host has ended, and this program runs again for the next host.
WAIT = 'read -r line && exec rm -f "$0"; exec "$@"'


def unlink(path: str) -> None:
    try:  # noqa: SIM105  (importing contextlib would take half a megabyte)
        posix.unlink(path)
    except OSError:
        pass


def listen(path: str) -> int:
    """Listen on `path`, report that to MMS, and return the socket's descriptor."""
    import _socket

    unlink(path)
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    # MMS waits for these two lines.
    posix.write(1, b"[PID] %d\nMMS worker started.\n" % posix.getpid())
    return listener.detach()


def send_to_host(listener: int, host_path: str) -> bool:
    """Send the socket to the host, whose connection becomes stdin; False if there is no host."""
    import _socket

    host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        host.connect(host_path)
        number = listener.to_bytes(4, sys.byteorder)
        host.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number)])
    except OSError:
        host.close()  # the host has ended; the entrypoint starts the next one
        return False
    posix.dup2(host.detach(), 0)
    return True


def run_owner(arguments: dict[str, str]) -> None:
    """Send the model's socket to the host; retry until it succeeds or MMS has ended."""
    mms = int(arguments.get("--mms", posix.getppid()))  # read before MMS could end unnoticed
    path = arguments["--sock-name"]
    command = [sys.executable, *sys.argv]
    if "--listener" in arguments:
        listener = int(arguments["--listener"])
        time.sleep(RETRY_S)  # in case the host closes each connection at once
    else:
        listener = listen(path)
        posix.set_inheritable(listener, True)
        command += ["--mms", str(mms), "--listener", str(listener)]
    host_path = posix.environ[b"RUN_DIR"].decode() + "/workers.sock"
    while posix.getppid() == mms:
        if send_to_host(listener, host_path):
            posix.execv("/bin/sh", ["/bin/sh", "-c", WAIT, path, *command])
        time.sleep(RETRY_S)
    unlink(path)


def main() -> None:
    try:
        posix.stat("hosted")  # in the model's folder, MMS's working directory for it
    except OSError:
        posix.execv(sys.executable, [sys.executable, "-m", "handlers.worker", *sys.argv[1:]])
    run_owner(dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False)))


main()
