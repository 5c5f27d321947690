"""Opens listening sockets."""

from __future__ import annotations

import socket

from serving.errors import StartError

BACKLOG = 2048  # connections not accepted yet; fewer: connections of a burst are refused


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises `StartError` if the port is taken or not allowed."""
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
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with"
            " --port (SAGEMAKER_BIND_TO_PORT), --management-port (MANAGEMENT_PORT), GRPC_PORT"
            " or --host"
        ) from None
    return listener
