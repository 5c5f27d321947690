"""One connection of Multi Model Server to a model's worker, in MMS's own protocol.

After a load MMS opens two files for what the model prints, which its own worker makes as named
pipes, and reads each on a thread. It makes those that are not there: empty ones, so the threads end
at once. What a worker prints goes to its own stdout. From pipes they would read until MMS closes
them, which it does not do where it connects again.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

LOAD = b"L"
READ_BYTES = 65_536


class LoadedModel:
    """What all connections to one model share: its handler service, loaded by the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handler: Any = None
        self._closed = False

    def service(self, message: dict[str, Any]) -> Any:
        """A service of MMS's with a context of its own. Raises `OSError` once it was closed."""
        from mms.model_loader import MmsModelLoader
        from mms.service import Service

        name, model_dir = message["modelName"].decode(), message["modelPath"].decode()
        handler, gpu = message["handler"].decode(), message.get("gpu")
        batch_size = message.get("batchSize", 1)
        with self._lock:
            if self._closed:
                raise OSError("the model's worker has ended")
            if self._handler is None:
                loaded = MmsModelLoader().load(name, model_dir, handler, gpu, batch_size)
                self._handler = loaded._entry_point
            return Service(name, model_dir, None, self._handler, gpu, batch_size)

    def close(self) -> None:
        """Gives up the model, after a load that is under way. It can be loaded no more."""
        with self._lock:
            self._closed = True
            if self._handler is not None:
                self._handler.__self__.close()


class Reader:
    """A socket to read from in small pieces: MMS's parser asks for each number alone, some sixty
    times a request."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read, self._at = b"", 0

    @property
    def holds_more(self) -> bool:
        return self._at < len(self._read)

    def recv(self, size: int) -> bytes:
        """From 1 to `size` bytes; none at the end."""
        if not self.holds_more:
            self._read, self._at = self._socket.recv(max(size, READ_BYTES)), 0
        begin, self._at = self._at, min(self._at + size, len(self._read))
        return self._read[begin : self._at]


class Connection:
    """Answers one message of MMS after the other."""

    def __init__(self, connection: socket.socket, model: LoadedModel) -> None:
        self.socket, self._model = connection, model
        self._reader = Reader(connection)
        self._service: Any = None
        self._handler: Any = None
        # An event of a closed connection may wake a second thread, where its number is used again.
        self._turn = threading.Lock()

    def answer(self) -> bool:
        """Waits for the next message and answers it, and what came with it. False when MMS has hung
        up."""
        with self._turn:
            while self._answer():
                if not self._reader.holds_more:
                    return True
            return False

    def _answer(self) -> bool:
        from mms.protocol.otf_message_handler import create_load_model_response, retrieve_msg

        try:
            command, message = retrieve_msg(self._reader)
        except (ValueError, OSError):
            return False
        if command != LOAD:
            self.socket.sendall(bytes(self._service.predict(message)))
            return True
        self._service = self._model.service(message)
        if self._handler is None:
            self._handler = self._service._entry_point.__self__
            self._handler.connected()
        name = message["modelName"].decode()
        answer = create_load_model_response(200, f"loaded model {name}. [PID]:{os.getpid()}")
        self.socket.sendall(bytes(answer))
        return True

    def close(self) -> None:
        if self._handler is not None:
            self._handler.disconnected()
        self.socket.close()
