"""The connections of a public port, and which of them are closed for others."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Protocol


class Connection(Protocol):
    """What a `Port` does with a connection; `HTTPProtocol` is one."""

    @property
    def unwritten_bytes(self) -> int:
        """The bytes of answers that the kernel has not taken."""

    def abort(self) -> None:
        """Close the connection at once, and drop data that the client has not read."""


class Port:
    """The connections of a port, the silent ones in the order in which they fell silent.

    A connection is *silent* while the server waits for its client: to send a head or a body, to
    read an answer, to close.
    """

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self.silent: OrderedDict[Connection, None] = OrderedDict()

    @property
    def busy(self) -> int:
        """The number of connections with a request that the server works on."""
        return len(self.open) - len(self.silent)

    def add(self, connection: Connection) -> None:
        self.open.add(connection)
        self.silent[connection] = None

    def remove(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.silent.pop(connection, None)

    def note(self, connection: Connection, *, is_silent: bool) -> None:
        """Update the order of silent connections; ignore a connection that is removed."""
        if connection not in self.open:
            return
        self.silent.pop(connection, None)
        if is_silent:
            self.silent[connection] = None

    def limit_unread(self, most: int) -> None:
        """Close connections, the longest silent first, until unread answers fit into `most` bytes.

        The one that fell silent last stays.
        """
        unread = {connection: connection.unwritten_bytes for connection in self.silent}
        total = sum(unread.values())
        for connection, size in list(unread.items())[:-1]:
            if total <= most:
                return
            if size:
                total -= size
                self._end(connection)

    def evict_silent(self) -> bool:
        """Close the connection that has been silent for longest; return False if none is."""
        if not self.silent:
            return False
        self._end(next(iter(self.silent)))
        return True

    def _end(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()


PORTS: defaultdict[int, Port] = defaultdict(Port)  # by number
