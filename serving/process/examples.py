"""Prints example commands for a person who has just started the server (SHOW_EXAMPLES)."""

from __future__ import annotations

from serving.errors import ServingError
from serving.settings import Settings
from serving.store import open_store

MAX_NAMES = 10  # of models, on one line

TEMPLATE = """
Models in the store: {names}. Try:

curl -X POST {management}/models -H 'Content-Type: application/json' -d '{{"model_name":"{name}","url":"{name}"}}'
curl {management}/models
curl {inference}/predictions/{name} -H 'Content-Type: application/json' -d '{{"inputs":"{prompt}","parameters":{{"max_new_tokens":40}}}}'
curl -X DELETE {management}/models/{name}

Ctrl-C stops the server.
"""  # noqa: E501

PROMPTS = {"sowol": "나 보기가 역겨워", "dongju": "죽는 날까지 하늘을 우러러"}


def text(settings: Settings) -> str:
    """Return the commands for a model of the store, or the reason why there is no model."""
    try:
        names = [model.name for model in open_store(settings.model_store).models()]
    except ServingError as error:
        return error.message
    if not names:
        return f"The model store {settings.model_store} is empty."
    name = "sowol" if "sowol" in names else names[0]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    if settings.host in ("0.0.0.0", "::", "127.0.0.1"):  # noqa: S104
        host = "localhost"
    return TEMPLATE.format(
        names=", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else ""),
        name=name,
        prompt=PROMPTS.get(name, "안녕하세요"),
        inference=f"{host}:{settings.port}",
        management=f"{host}:{settings.management_port}",
    )
