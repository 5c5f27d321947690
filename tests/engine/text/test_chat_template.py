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


def test_a_template_with_what_transformers_adds_to_jinja() -> None:
    assert render(TURNS) == ('<s><user>안녕?<assistant>"네"</s><user>오늘 날씨는?<assistant>')


def test_blocks_leave_no_lines_and_no_indentation() -> None:
    lines = ("{% for m in messages %}", "  {% if true %}", "{{ m.role }}", "  {% endif %}")
    source = "\n".join((*lines, "{% endfor %}"))
    assert render(source) == "system\nuser\nassistant\nuser\n"


def test_json_is_not_escaped_for_a_web_page() -> None:
    assert render("{{ messages[2].content | tojson }}") == '"\\"네\\""'
    assert render("{{ {'b': '<가>', 'a': [1]} | tojson(indent=1) }}") == (
        '{\n "b": "<가>",\n "a": [\n  1\n ]\n}'
    )


def test_a_template_knows_the_time() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_template_that_refuses_says_why() -> None:
    source = "{{ raise_exception('system은 안 됩니다') if messages[0].role == 'system' }}"
    assert "says: system은 안 됩니다" in refused(lambda: render(source))
    assert render(source, CHAT[1:]) == ""


def test_a_template_that_is_none_is_named_with_its_line() -> None:
    assert "no chat template: line 2: " in refused(lambda: render("가\n{% fi %}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.없는.것 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(1000000) | list }}",
        "{% include 'a' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_refused(source: str) -> None:
    assert "this model's chat_template.jinja failed: " in refused(lambda: render(source))


def find(folder: Path) -> tuple[str, str] | None:
    (folder / "m.spiece").touch()
    return find_chat_template(read_files(folder / "m.spiece"))


def test_its_own_file_counts_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "가"})
    assert find(tmp_path) == ("가", "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("나", encoding="utf-8")
    assert find(tmp_path) == ("나", "chat_template.jinja")


def test_of_several_templates_the_default_one_counts(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "가"}, {"name": "default", "template": "나"}, 1]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": several})
    assert find(tmp_path) == ("나", "tokenizer_config.json")
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": several[:1]})
    assert find(tmp_path) is None


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes("가".encode("cp949"))
    assert "is not UTF-8" in refused(lambda: find(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError, match="no plain file"):
        find(tmp_path)
