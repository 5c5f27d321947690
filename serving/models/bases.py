"""Locates the base models of adapters by the names in the adapters' configuration files."""

from __future__ import annotations

import asyncio
import fnmatch
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from common.model_files import ADAPTER, is_adapter
from common.settings import comma_separated
from serving.errors import BadRequest, ModelNotInStore, NotAModel, StartError, UrlNotAllowed
from serving.models.model_settings import FILE, ModelSettings, read_object
from serving.store import Lookups, StoredModel
from serving.tokens import current

MAX_CONFIG_BYTES = 1 << 20


class Bases:
    """Locates the base of an adapter in the store."""

    def __init__(
        self, lookups: Lookups, known: str, named: Mapping[str, str] | None = None
    ) -> None:
        """Parses `known`, the value of ADAPTER_BASES. Raises `StartError`.

        named: names of models outside of the store, by path
        """
        self._lookups, self._known, self._named = lookups, parse(known), named or {}

    async def find(self, folder: Path, settings: ModelSettings) -> StoredModel | None:
        """Returns the base of the adapter in `folder`; None if the folder has no adapter.

        The `base` in the adapter's settings comes first. Otherwise it is looked up by the name of
        the base that the adapter was trained on: in ADAPTER_BASES, or else in the store, under the
        name or the last part of it, such as `kogpt2-base-v2` of `/home/me/kogpt2-base-v2`. Its
        name is a path where it was looked up by one. Raises `BadRequest`, `Forbidden` if the
        token of the request that loads the adapter may not use the base, and errors of the store.
        """
        name = await asyncio.to_thread(base_name, folder)
        if name is None:
            if settings.base is not None:
                raise BadRequest(
                    f"base is {settings.base!r}, but the model is no adapter (it has no {ADAPTER})"
                )
            return None
        candidates = self._candidates(name, settings)
        for candidate in candidates:
            try:
                base = await self._lookups.locate(candidate)
            except (ModelNotInStore, UrlNotAllowed):
                continue
            except NotAModel as error:
                raise BadRequest(f"the base of the adapter is no model: {error.message}") from None
            # The last part of a path, as models loaded by path are called, gives no right: another
            # team's model may end in it, too.
            if candidate.startswith(("/", "file://")):
                path = unquote(urlsplit(candidate).path)
                base = replace(base, name=self._named.get(path, path))
            if (token := current.get()) is not None:
                token.check_base(base.name)
            return base
        tried = ", ".join(candidates) or "nothing, because it gives no name"
        raise BadRequest(
            f"the model is an adapter of {name!r}, which is not in the store (looked for: {tried});"
            f" put its base there under that name, or name the one that is: by base in {FILE} or in"
            " the load request, or for all adapters by ADAPTER_BASES"
        )

    def _candidates(self, name: str, settings: ModelSettings) -> list[str]:
        """Returns names or urls under which to look for the base `name`, best first."""
        if settings.base is not None:
            return [settings.base]
        for pattern, known in self._known.items():
            if fnmatch.fnmatchcase(name, pattern):
                return [known]
        if "://" in name:
            return []
        last = PurePosixPath(name.replace("\\", "/")).name
        whole = [] if name.startswith(("/", ".", "~")) or "\\" in name else [name]
        return [candidate for candidate in dict.fromkeys((*whole, last)) if candidate]


def parse(text: str) -> Mapping[str, str]:
    """Parses ADAPTER_BASES, such as `skt/*=kogpt2,/home/*=other`. Raises `StartError`."""
    known = {}
    for entry in comma_separated(text):
        pattern, separator, name = (part.strip() for part in entry.partition("="))
        if not (pattern and separator and name):
            raise StartError(
                f"ADAPTER_BASES has {entry!r}; entries are NAME=MODEL, separated by commas"
            )
        known[pattern] = name
    return known


def base_name(folder: Path) -> str | None:
    """Returns the name of the base in an adapter's configuration file, empty if it has none.

    None if there is no adapter in `folder`. Raises `BadRequest` for an invalid file.
    """
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries if entry.is_file()}
    except OSError:  # the load of the model will fail with this error
        return None
    if not is_adapter(names):
        return None
    name = read_object(folder / ADAPTER, MAX_CONFIG_BYTES).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""
