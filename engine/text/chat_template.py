"""Chat templates: Jinja, run as transformers' `apply_chat_template` does.

The source is `chat_template.jinja` or a field of `tokenizer_config.json`. It is untrusted code: it
runs in a text process, which is killed if the template never ends, and in Jinja's sandbox, which
blocks access to Python's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest
from engine.text.files import CHAT_TEMPLATE, CONFIG, Files, json_in

DEFAULT = "default"

Message = Mapping[str, str]


class TemplateRefused(TemplateError):
    """The error that a template raises with `raise_exception`."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, a mark for training; renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template, with variables such as `bos_token`. Raises `InvalidRequest`."""

    def __init__(self, source: str, file: str, special_tokens: Mapping[str, str]) -> None:
        self._file, self._special_tokens = file, special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            message = f"line {error.lineno}: {error.message}"
            raise InvalidRequest(f"this model's {file} is no chat template: {message}") from None
        except (SyntaxError, ValueError, RecursionError) as error:  # in the generated Python
            message = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"this model's {file} is no chat template: {message}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt up to the assistant's answer. Raises `InvalidRequest` if it fails."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateRefused as error:
            raise InvalidRequest(f"messages: the model's chat template says: {error}") from None
        except MemoryError:
            raise InvalidRequest(
                f"this model's {self._file} failed: it takes too much memory"
            ) from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"this model's {self._file} failed: {reason}") from None


def find_chat_template(files: Files) -> tuple[str, str] | None:
    """Return a template's source and file, if any. Raises `ArtifactError`, `InvalidRequest`."""
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode("utf-8"), CHAT_TEMPLATE
        except UnicodeDecodeError:
            raise InvalidRequest(f"this model's {CHAT_TEMPLATE} is not UTF-8") from None
    template = json_in(files, CONFIG).get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named[::-1] if e.get("name") == DEFAULT), None)
    return (template, CONFIG) if isinstance(template, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: Any) -> NoReturn:
    raise TemplateRefused(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)
