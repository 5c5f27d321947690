"""A connection of Multi Model Server to a model's worker, in MMS's own protocol.

After a load MMS opens two files for the model's output, named pipes made by its own worker, and
reads each on a thread. This worker makes none and prints to stdout. MMS then creates empty files,
and its threads end at once; threads that read pipes would leak whenever MMS reconnects.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

LOAD = b"L"
READ_BYTES = 65_536


class LoadedModel:
    """The handler service that all connections to one model share; loaded by the first."""

    def __init__(self, handler: Any = None) -> None:
        """`handler` is the method of a loaded service; without it the first connection loads."""
        self._lock = threading.Lock()
        self._handler = handler
        self._closed = False

    def service(self, message: dict[str, Any]) -> Any:
        """Return a new MMS service of the model. Loads the model if it is not loaded.

        Raises `OSError` after `close`.
        """
        from mms.model_loader import MmsModelLoader
        from mms.service import Service

        name, model_dir = message["modelName"].decode(), message["modelPath"].decode()
        handler, gpu = message["handler"].decode(), message.get("gpu")
        batch_size = message.get("batchSize", 1)
        with self._lock:
            if self._closed:
                raise OSError("the model was closed, because its owner has ended")
            if self._handler is None:
                loaded = MmsModelLoader().load(name, model_dir, handler, gpu, batch_size)
                self._handler = loaded._entry_point
            return Service(name, model_dir, None, self._handler, gpu, batch_size)

    def close(self) -> None:
        """Unload the model, after a load in progress, and prevent further loads."""
        with self._lock:
            self._closed = True
            if self._handler is not None:
                self._handler.__self__.close()


class Reader:
    """Buffers a socket's bytes: MMS's parser calls `recv` some sixty times a request."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer, self._position = b"", 0

    @property
    def has_buffered(self) -> bool:
        return self._position < len(self._buffer)

    def recv(self, size: int) -> bytes:
        """Return from 1 to `size` bytes; `b""` at the end of the stream."""
        if not self.has_buffered:
            self._buffer, self._position = self._socket.recv(max(size, READ_BYTES)), 0
        begin = self._position
        self._position = min(begin + size, len(self._buffer))
        return self._buffer[begin : self._position]


class Connection:
    """Answers the messages on one of MMS's connections, one at a time."""

    def __init__(self, connection: socket.socket, model: LoadedModel) -> None:
        self.socket, self._model = connection, model
        self._reader = Reader(connection)
        self._service: Any = None
        self._handler: Any = None
        # A late event of a closed connection may wake a second thread if its descriptor is reused.
        self._reading = threading.Lock()

    def answer(self) -> bool:
        """Wait for a message; answer it and buffered messages. False if MMS has disconnected."""
        with self._reading:
            while self._answer():
                if not self._reader.has_buffered:
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
