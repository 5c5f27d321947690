"""What Multi Model Server starts for each model (`$MODEL_SERVER_HOME/mms/model_service_worker.py`).

For a model of the engine's it owns the socket that MMS connects to, hands it to the host of all of
them (`handlers.host`) and waits; for any other it becomes a worker (`handlers.worker`). Nothing is
imported but what is built in: this process is there once a model.
"""

import posix
import sys
import time

RETRY_S = 0.05


def unlink(path: str) -> None:
    try:  # noqa: SIM105  (contextlib would cost half a megabyte)
        posix.unlink(path)
    except OSError:
        pass


def own(path: str, host_path: str) -> None:
    """Until the host says that MMS has left the model alone, or MMS is gone."""
    import _socket

    mms = posix.getppid()  # who ends before it has read those lines is noticed, too
    unlink(path)
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    # MMS waits for these two lines.
    posix.write(1, b"[PID] %d\nMMS worker started.\n" % posix.getpid())
    number = listener.fileno().to_bytes(4, sys.byteorder)
    while posix.getppid() == mms:
        host = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            host.connect(host_path)
            host.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number)])
            if host.recv(1):
                break
        except OSError:
            pass
        host.close()  # it has ended; the next one is being started
        time.sleep(RETRY_S)
    unlink(path)


def main() -> None:
    try:
        posix.stat("hosted")  # in the worker's folder, which MMS starts it in
    except OSError:
        posix.execv(sys.executable, [sys.executable, "-m", "handlers.worker", *sys.argv[1:]])
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    host_path = posix.environ[b"RUN_DIR"].decode() + "/workers.sock"
    own(arguments["--sock-name"], host_path)


main()
