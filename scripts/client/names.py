"""Names of models in the paths of a server's routes."""

from __future__ import annotations

from urllib.parse import quote

from command.errors import Problem
from serving.errors import UrlNotAllowed
from serving.names import model_name


def model_path(name: str) -> str:
    """Return a model's name as a part of a path, where `..` would name another route.

    Raises `Problem`.
    """
    try:
        return quote(model_name(name), safe="/")
    except UrlNotAllowed as error:
        raise Problem(error.message) from None
