"""A chat template is run as transformers runs it, whatever it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ArtifactError, InvalidRequest
from engine.text.chat_template import ChatTemplate, find_chat_template
from engine.text.files import read_files
from tests.engine.hugging_face import write_json

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "짧게 답한다."},
    {"role": "user", "content": "안녕?"},
    {"role": "assistant", "content": '"네"'},
    {"role": "user", "content": "오늘 날씨는?"},
]
TURNS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}
        {%- continue %}
    {%- endif %}
<{{ message.role }}>{{ message.content | trim }}
    {%- generation %}{{ eos_token if message.role == "assistant" }}{% endgeneration %}

{%- endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


def render(source: str, messages: Any = CHAT) -> str:
    return ChatTemplate(source, "chat_template.jinja", TOKENS).render(messages)


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        work()
    return caught.value.message


def test_a_template_has_the_extensions_of_transformers() -> None:
    assert render(TURNS) == '<s><user>안녕?<assistant>"네"</s><user>오늘 날씨는?<assistant>'
    # Blocks leave no lines and no indentation.
    lines = ("{% for m in messages %}", "  {% if true %}", "{{ m.role }}", "  {% endif %}")
    assert render("\n".join((*lines, "{% endfor %}"))) == "system\nuser\nassistant\nuser\n"
    # JSON is not escaped for a web page.
    assert render("{{ messages[2].content | tojson }}") == '"\\"네\\""'
    indented = render("{{ {'b': '<가>', 'a': [1]} | tojson(indent=1) }}")
    assert indented == '{\n "b": "<가>",\n "a": [\n  1\n ]\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_template_that_refuses_or_is_none_says_why() -> None:
    source = "{{ raise_exception('system은 안 됩니다') if messages[0].role == 'system' }}"
    assert "says: system은 안 됩니다" in refused(lambda: render(source))
    assert render(source, CHAT[1:]) == ""
    assert "no chat template: line 2: " in refused(lambda: render("가\n{% fi %}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.없는.것 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(1000000) | list }}",
        "{{ 'a' * 10 ** 18 }}",  # a MemoryError
        "{% include 'a' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_refused(source: str) -> None:
    assert "this model's chat_template.jinja failed: " in refused(lambda: render(source))


def test_its_own_file_counts_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    (tmp_path / "m.spiece").touch()
    path, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"

    def find() -> tuple[str, str] | None:
        return find_chat_template(read_files(tmp_path / "m.spiece"))

    assert find() is None
    write_json(config, {"chat_template": "가"})
    assert find() == ("가", "tokenizer_config.json")
    several = [{"name": "tool_use", "template": "가"}, {"name": "default", "template": "나"}, 1]
    write_json(config, {"chat_template": several})
    assert find() == ("나", "tokenizer_config.json")
    path.write_text("다", encoding="utf-8")
    assert find() == ("다", "chat_template.jinja")
    path.unlink()
    write_json(config, {"chat_template": several[:1]})
    assert find() is None
    path.write_bytes("가".encode("cp949"))
    assert "is not UTF-8" in refused(find)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError, match="no plain file"):
        find()
