"""Locates the base models of adapters, of deltas and of whole fine-tunes."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from common.errors import ServiceError
from common.model_files import ADAPTER, BASE_NAME, DELTA, is_adapter, is_delta
from common.settings import comma_separated
from handlers.dispatch import is_hosted
from serving.errors import BadRequest, ModelNotInStore, NotAModel, StartError, UrlNotAllowed
from serving.models.model import Model
from serving.models.model_settings import FILE, ModelSettings, read_object
from serving.settings import Settings
from serving.store import Lookups, StoredModel
from serving.tokens import current

CONFIG = "config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_NAME = 1024  # characters of a base's name or path; a longer one names no base

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """A model's base; None for a model that is served whole, with the reason if it names a base."""

    stored: StoredModel | None = None
    is_adapter: bool = False
    is_delta: bool = False  # a folder with a delta in place of weights
    whole_because: str = ""


class Bases:
    """Locates the bases of models in the store."""

    def __init__(
        self, lookups: Lookups, settings: Settings, named: Mapping[str, str] | None = None
    ) -> None:
        """Parse MODEL_BASES. Raises `StartError`.

        named: names of models outside of the store, by path
        """
        self._lookups, self._settings, self._named = lookups, settings, named or {}
        self._known = parse(settings.model_bases)

    async def find(self, model: Model) -> Base:
        """Return the base of a fetched model.

        The `base` in its settings comes first. Otherwise it is looked up by the name of the base
        that the model was trained on: in MODEL_BASES, which also has names of whole models, or else
        in the store, under the name or the last part of it, such as `kogpt2-base-v2` of
        `/home/me/kogpt2-base-v2`. Its name is a path where it was looked up by one.

        Without it an adapter or a folder with a delta cannot be served, and a whole model whose
        settings name it is refused; any other is served whole. So it is where the token of the
        request that loads the model may not use the base. Raises `BadRequest`, `Forbidden`, and
        errors of the store.
        """
        assert model.fetched is not None
        folder, settings = model.fetched.path, model.settings
        if await asyncio.to_thread(is_adapter, folder):
            name = await _base_name(folder / ADAPTER, "base_model_name_or_path")
            base = await self._needed(settings, "an adapter", name, [name])
            return Base(base, is_adapter=True)
        if not await asyncio.to_thread(is_hosted, folder, model.options.get("handler")):
            if settings.base is not None:
                raise BadRequest(
                    f"base cannot be set for model {model.name}: the engine does not compute it"
                )
            return Base()
        if await asyncio.to_thread(is_delta, folder):
            name = await _base_name(folder / CONFIG, BASE_NAME)
            names = [name, model.name, model.stored.name]
            base = await self._needed(settings, f"a delta ({DELTA})", name, names)
            return Base(base, is_delta=True)
        # The one model of a server has nothing to share its base with.
        if settings.share is False or model.url in self._named:
            return Base()
        if not self._computes_deltas(settings):
            if settings.base is None:
                return Base()
            return Base(whole_because="it is not computed in int8 on a CPU")
        if settings.base is not None:
            base = await self._explicit(settings.base)
            if base.url == model.stored.url:
                raise BadRequest(f"base is {settings.base!r}, which is the model itself")
            return Base(base)
        return await self._of_whole(folder, model)

    def _computes_deltas(self, settings: ModelSettings) -> bool:
        """Return whether a model with these settings is computed in int8 on a CPU."""
        server = self._settings
        default = server.precision if settings.backend in (None, server.backend) else ""
        return server.device == "cpu" and (settings.precision or default or "int8") == "int8"

    async def _needed(
        self, settings: ModelSettings, kind: str, name: str, names: Iterable[str]
    ) -> StoredModel:
        """Return the base of a model without weights of its own. Raises `BadRequest`, `Forbidden`.

        kind: of the model, for errors
        name, names: as of `_candidates`
        """
        if settings.share is False:
            raise BadRequest(f"share is false, but {kind} cannot be served without its base")
        if settings.base is not None:
            return await self._explicit(settings.base)
        candidates = self._candidates(name, names)
        for candidate in candidates:
            with contextlib.suppress(ModelNotInStore, UrlNotAllowed):
                return await self._allowed(candidate)
        tried = ", ".join(candidates) or "nothing, because it gives no name"
        raise BadRequest(
            f"the model is {kind} of {name!r}, which is not in the store (looked for: {tried});"
            f" put its base there under that name, or name the one that is: by base in {FILE} or in"
            " the load request, or for all such models by MODEL_BASES"
        )

    async def _of_whole(self, folder: Path, model: Model) -> Base:
        name = ""
        with contextlib.suppress(BadRequest):  # the engine explains what is wrong with the file
            name = await _base_name(folder / CONFIG, BASE_NAME)
        candidates = self._candidates(name, [name, model.name, model.stored.name])
        for candidate in candidates:
            try:
                base = await self._locate(candidate)
            except ServiceError as error:
                logger.info("model %s has no base %s: %s", model.name, candidate, error.message)
                continue
            if base.url == model.stored.url:
                return Base()
            token = current.get()
            if token is None or token.may_call(base.name):
                return Base(base)
        # One reason for both: a token learns nothing about models that it may not use.
        return Base(whole_because="its base is not in the store" if candidates else "")

    async def _explicit(self, base: str) -> StoredModel:
        """Return the base that a model's settings name. Raises `BadRequest`, `Forbidden`."""
        try:
            return await self._allowed(base)
        except (ModelNotInStore, UrlNotAllowed) as error:
            raise BadRequest(f"base is {base!r}: {error.message}") from None

    async def _allowed(self, candidate: str) -> StoredModel:
        """Locates a base. Raises `Forbidden` if the current token may not use it, `BadRequest`."""
        try:
            base = await self._locate(candidate)
        except NotAModel as error:
            raise BadRequest(f"the base is no model: {error.message}") from None
        if (token := current.get()) is not None:
            token.check_base(base.name)
        return base

    async def _locate(self, candidate: str) -> StoredModel:
        base = await self._lookups.locate(candidate)
        # The last part of a path, as models loaded by path are called, gives no right: another
        # team's model may end in it, too.
        if candidate.startswith(("/", "file://")):
            path = unquote(urlsplit(candidate).path)
            base = replace(base, name=self._named.get(path, path))
        return base

    def _candidates(self, base: str, names: Iterable[str]) -> list[str]:
        """Return names or urls under which to look for a model's base, best first.

        base: the name of the base in the model's files, or ""
        names: names that a pattern of MODEL_BASES can match
        """
        for pattern, known in self._known.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return [known]
        if "://" in base:
            return []
        last = PurePosixPath(base.replace("\\", "/")).name
        whole = [] if base.startswith(("/", ".", "~")) or "\\" in base else [base]
        return [candidate for candidate in dict.fromkeys((*whole, last)) if candidate]


def parse(text: str) -> Mapping[str, str]:
    """Parse MODEL_BASES, such as `skt/*=kogpt2,poems-*=other`. Raises `StartError`."""
    known = {}
    for entry in comma_separated(text):
        pattern, separator, name = (part.strip() for part in entry.partition("="))
        if not (pattern and separator and name):
            raise StartError(
                f"MODEL_BASES has {entry!r}; entries are NAME=MODEL, separated by commas"
            )
        known[pattern] = name
    return known


async def _base_name(file: Path, field: str) -> str:
    """Return the name of a model's base in one of its files, or "". Raises `BadRequest`."""
    value = (await asyncio.to_thread(read_object, file, MAX_CONFIG_BYTES)).get(field)
    return value if isinstance(value, str) and len(value) <= MAX_NAME else ""
