"""What Multi Model Server starts for each model (`$MODEL_SERVER_HOME/mms/model_service_worker.py`).

For a model of the engine's it owns the socket that MMS connects to, hands it to the host of all of
them (`handlers.host`) and becomes a shell that waits, which takes 0.1 MB instead of Python's 3; for
any other it becomes a worker (`handlers.worker`). Nothing is imported but what is built in: this
process is there once a model.
"""

import posix
import sys
import time

RETRY_S = 0.05
# With the host's connection as its input: a line says that MMS has left the model alone; an end
# without one, that the host has ended, and this program looks for the next.
WAIT = 'read -r line && exec rm -f "$0"; exec "$@"'


def unlink(path: str) -> None:
    try:  # noqa: SIM105  (contextlib would cost half a megabyte)
        posix.unlink(path)
    except OSError:
        pass


def listen(path: str) -> int:
    """The descriptor of the socket, which MMS knows of by then."""
    import _socket

    unlink(path)
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    # MMS waits for these two lines.
    posix.write(1, b"[PID] %d\nMMS worker started.\n" % posix.getpid())
    return listener.detach()


def hand_over(listener: int, host_path: str) -> bool:
    """Whether the host has it; its connection is this process's input then."""
    import _socket

    host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        host.connect(host_path)
        number = listener.to_bytes(4, sys.byteorder)
        host.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number)])
    except OSError:
        host.close()  # it has ended; the next one is being started
        return False
    posix.dup2(host.detach(), 0)
    return True


def own(arguments: dict[str, str]) -> None:
    """Until the host has the socket, or MMS is gone."""
    mms = int(arguments.get("--mms", posix.getppid()))  # who ends before those lines is noticed too
    path = arguments["--sock-name"]
    command = [sys.executable, *sys.argv]
    if "--listener" in arguments:
        listener = int(arguments["--listener"])
        time.sleep(RETRY_S)  # a host that hangs up at once is not asked without a pause
    else:
        listener = listen(path)
        posix.set_inheritable(listener, True)
        command += ["--mms", str(mms), "--listener", str(listener)]
    host_path = posix.environ[b"RUN_DIR"].decode() + "/workers.sock"
    while posix.getppid() == mms:
        if hand_over(listener, host_path):
            posix.execv("/bin/sh", ["/bin/sh", "-c", WAIT, path, *command])
        time.sleep(RETRY_S)
    unlink(path)


def main() -> None:
    try:
        posix.stat("hosted")  # in the worker's folder, which MMS starts it in
    except OSError:
        posix.execv(sys.executable, [sys.executable, "-m", "handlers.worker", *sys.argv[1:]])
    own(dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False)))


main()
