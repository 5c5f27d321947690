"""Opens listening sockets."""

from __future__ import annotations

import contextlib
import socket

import psutil

from serving.errors import StartError

BACKLOG = 2048  # connections not accepted yet; fewer: connections of a burst are refused


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `StartError` if the port is taken or not allowed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:  # `::` is for IPv4, too, also where net.ipv6.bindv6only is 1
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror}{_holder(port)}; choose"
            " another with --port (SAGEMAKER_BIND_TO_PORT), --management-port (MANAGEMENT_PORT),"
            " GRPC_PORT or --host"
        ) from None
    return listener


def _holder(port: int) -> str:
    """Describe the process that listens on a port; empty if this user may not know it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({command:.80})"
    return ""
