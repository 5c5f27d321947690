"""Errors that end the server or a request, with the status they become."""

from __future__ import annotations


class ServingError(Exception):
    """Base of the serving package's errors; the message is meant for people."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SettingError(ServingError):
    """An option or environment variable has a value that cannot be used."""


class StartError(ServingError):
    """The server cannot start here: a taken port, no Java, a second server in the same folder."""


class ArchiveError(ServingError):
    """An archive is damaged, too large, or would write outside its folder."""

    status = 400
