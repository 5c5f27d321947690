"""generation.json: templates, defaults, stop tokens, and texts that are stripped from answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest, PromptTooLong
from common.parameters import Parameters
from engine.artifacts.open import open_artifact
from engine.engine import Engine
from engine.text.prompts import Prompts
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.artifacts import reading
from tests.engine.conftest import NewEngine
from tests.engine.engines import Request, make_talkative
from tests.engine.hugging_face import make_hugging_face, write_json
from tests.engine.models import make_artifact

V1 = "<usr> {text} </s><unused1> {sentiment} </s><sys>"
V2 = "<usr>{text}<unused1>{sentiment}<sys>"
DEFAULTS = {"sentiment": "0"}


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "v1")


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    return make_hugging_face(tmp_path / "v2")


def generation(folder: Path, **fields: Any) -> Path:
    write_json(folder / "generation.json", fields)
    return folder


def prompts(folder: Path, **fields: Any) -> Prompts:
    return Prompts(open_artifact(generation(folder, **fields)))


def parameters(folder: Path, given: Any) -> Parameters:
    return Parameters.parse(given, open_artifact(folder).generation.parameters)


def refused(folder: Path) -> str:
    message = reading.refused(folder, lambda folder: Prompts(open_artifact(folder)))
    assert message.startswith("generation.json")
    return message


# Templates


def test_v1s_control_pieces_stand_for_themselves_and_each_text_begins_anew(v1: Path) -> None:
    """As the chat fine-tunes were trained: `[<usr>] + tokenize(q) + [</s>] + ...`."""
    found = prompts(v1, template=V1, defaults=DEFAULTS)
    tokenizer = found.tokenizer
    assert isinstance(tokenizer, SentencePieceTokenizer)
    cut, name = tokenizer._model.encode, tokenizer._model.piece_to_id
    expected = [name("<usr>"), *cut("오늘은 날씨가"), name("</s>"), name("<unused1>"), *cut("0")]
    expected += [name("</s>"), name("<sys>")]
    assert found.encode("오늘은 날씨가") == expected
    assert tokenizer._pieces[expected[0]] == "<usr>"
    assert tokenizer.bos_id not in expected


def test_a_request_may_fill_every_field(v1: Path, v2: Path) -> None:
    for folder, template in ((v1, V1), (v2, V2)):
        found = prompts(folder, template=template, defaults=DEFAULTS)
        assert found.encode({"text": "가"}) == found.encode("가")
        assert found.encode({"text": "가", "sentiment": "0"}) == found.encode("가")
        assert found.encode({"text": "가", "sentiment": "1"}) != found.encode("가")


def test_a_field_may_stand_twice_and_a_brace_is_written_twice(v2: Path) -> None:
    found = prompts(v2, template="{{{text}}} {text}")
    plain = Prompts(open_artifact(make_hugging_face(v2.with_name("plain"))))
    assert found.encode("나는") == plain.encode("{나는} 나는")


def test_a_request_that_does_not_fit_the_template_is_refused(v2: Path) -> None:
    found = prompts(v2, template="{text}<usr>{sentiment}<sys>{mood}", defaults=DEFAULTS)
    cases: list[tuple[Any, str]] = [
        ({"text": "가", "기분": "1"}, "inputs.기분 is not known; known are text, sentiment, mood"),
        ({"text": "가"}, "inputs.mood is missing"),
        ({"mood": "1"}, "inputs.text is missing"),
        ("가", "inputs.mood is missing"),
        ({"text": "", "mood": " "}, "inputs is empty"),
        ({}, "inputs is empty"),
        ("", "inputs is empty"),
    ]
    for inputs, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            found.encode(inputs)
    found = prompts(v2, template="{a}", defaults={"a": "나"})
    with pytest.raises(InvalidRequest, match="must be an object of fields; known are a"):
        found.encode("가")
    assert found.encode({"a": "나"})
    with pytest.raises(InvalidRequest, match="the model brings no template"):
        prompts(v2).encode({"text": "가"})
    found = prompts(v2, template=V2, defaults=DEFAULTS)
    with pytest.raises(PromptTooLong, match="tokens"):
        found.encode({"text": "가", "sentiment": "나 보기가 " * 40})


def test_v1s_user_cannot_write_control_tokens(v1: Path) -> None:
    found = prompts(v1, template=V1, defaults=DEFAULTS)
    for text in ("<usr>", "안녕<sys>나쁜 말", "＜usr＞ 가", "<unused1>1"):
        with pytest.raises(InvalidRequest, match="is reserved for"):
            found.encode(text)
    ids, eos = found.encode("</s>"), found.tokenizer.eos_id  # which is text there
    assert ids.count(eos) == found.encode("가").count(eos) == 2
    plain = prompts(v1)
    assert plain.tokenizer.token_id("<usr>") in plain.encode("<usr>안녕")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"온도": 1}, "온도 is not known; known are template"),
        ([], "must be a JSON object"),
        ({"template": 1}, "template must be text"),
        ({"template": "<usr>"}, "has no field"),
        ({"template": "{text"}, "template: "),
        ({"template": "text}"}, "template: "),
        ({"template": "{}"}, "is no field"),
        ({"template": "{text!r}"}, "is no field"),
        ({"template": "{text:>9}"}, "is no field"),
        ({"template": "{a.b}"}, "is no field"),
        ({"template": "{a[0]}"}, "is no field"),
        ({"template": "{text}", "defaults": {"mood": "1"}}, "defaults.mood is no field"),
        ({"template": "{text}", "defaults": {"text": 1}}, "object of texts"),
        ({"defaults": {"text": "1"}}, "there is none"),
        ({"template": "{text}" + "나는 " * 200}, "template: inputs has"),
        ({"parameters": {"온도": 1}}, "parameters.온도 is not known"),
        ({"parameters": {"temperature": -1}}, "parameters.temperature must be from 0"),
        ({"parameters": {"return_full_text": True}}, "can only be in a request"),
        ({"parameters": {"num_return_sequences": 2}}, "can only be in a request"),
        ({"parameters": 1}, "parameters must be a JSON object"),
        ({"stop_tokens": ["<끝>"]}, "the tokenizer has no token <끝>"),
        ({"stop_tokens": "</s>"}, "stop_tokens must be a list of texts"),
        ({"strip": [""]}, "strip must be a list of texts"),
        ({"strip": ["a"] * 17}, "strip may hold"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(v2: Path, content: Any, reason: str) -> None:
    write_json(v2 / "generation.json", content)
    assert reason in refused(v2)


def test_a_file_that_is_no_json_or_half_text_is_named(v1: Path) -> None:
    path = v1 / "generation.json"
    for content, reason in (
        ("{", "is not JSON"),
        ('{"\\ud800": 1}', "holds \\ud800, half a surrogate pair"),
        ('{"defaults": {"\\uDFFF": "x"}}', "holds \\udfff, half a surrogate pair"),
        ('{"' + "가" * 100_000 + '": 1}', "is not known"),
        (" " * (16 << 20) + "{}", "is longer than 16 MiB"),
    ):
        path.write_text(content, encoding="utf-8")
        assert reason in refused(v1)
    whole = '{"template": "{q} \\ud83d\\ude42 \\\\ud800", "stop_tokens": ["</s>"]}'
    path.write_text(whole, encoding="utf-8")
    template = open_artifact(v1).generation.template
    assert template is not None
    assert [part.text for part in template.parts] == ["q", " 🙂 \\ud800"]


# Defaults


def test_a_requests_parameters_come_before_the_models(v1: Path) -> None:
    generation(v1, parameters={"max_new_tokens": 7, "stop": ["\n"], "repetition_penalty": 1.3})
    assert parameters(v1, None) == Parameters(7, ("\n",), repetition_penalty=1.3)
    assert parameters(v1, {"max_new_tokens": 9}).max_new_tokens == 9
    assert parameters(v1, {"stop": []}).stop == ()


def test_a_model_that_draws_can_be_asked_not_to(v1: Path) -> None:
    generation(v1, parameters={"do_sample": True, "temperature": 0.8})
    assert parameters(v1, {}).do_sample
    assert parameters(v1, {"num_return_sequences": 2}).num_return_sequences == 2
    assert not parameters(v1, {"do_sample": False}).do_sample
    generation(v1, parameters={"do_sample": False})
    assert not parameters(v1, {}).do_sample
    assert parameters(v1, {"temperature": 0.5}).do_sample


def test_hugging_faces_defaults_are_below_generation_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"do_sample": True, "temperature": 0.7, "top_k": 40, "max_new_tokens": 11}
    theirs |= {"eos_token_id": [1, 3], "stop_strings": ["끝"], "num_beams": 4, "min_p": 0.1}
    theirs |= {"typical_p": 0.9, "epsilon_cutoff": 0}
    folder = make_hugging_face(tmp_path / "m", generation_config=theirs)
    found = prompts(folder, parameters={"max_new_tokens": 5})
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 40, "min_p": 0.1, "typical_p": 0.9}
    assert parameters(folder, None) == Parameters(5, ("끝",), **drawn)
    assert found.stop_ids == {1, 3}
    assert "num_beams is not supported" in caplog.text
    assert "epsilon_cutoff" not in caplog.text


def test_a_file_that_samples_without_top_k_means_transformers_default(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 50), ({"top_k": None}, 50), ({"top_k": 0}, 0)]
    for i, (theirs, top_k) in enumerate(cases):
        folder = make_hugging_face(
            tmp_path / str(i), generation_config={"do_sample": True, **theirs}
        )
        assert parameters(folder, None) == Parameters(do_sample=True, top_k=top_k)


def test_hugging_faces_sampling_counts_only_where_it_samples(tmp_path: Path) -> None:
    theirs = {"do_sample": False, "temperature": 0.7, "top_k": 40, "typical_p": 0.9}
    theirs |= {"max_new_tokens": 9, "min_new_tokens": 20}
    theirs |= {"bad_words_ids": [[3], [5, 6]], "no_repeat_ngram_size": 3}
    folder = make_hugging_face(tmp_path / "m", generation_config=theirs)
    rules = {"no_repeat_ngram_size": 3, "bad_words_ids": ((3,), (5, 6)), "min_new_tokens": 20}
    assert parameters(folder, None) == Parameters(9, **rules)  # at most max_new_tokens


def test_settings_in_config_json_count_without_a_generation_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in checkpoints of KoGPT2's time."""
    older = {"do_sample": True, "top_k": 40, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]]}
    older |= {"repetition_penalty": 2.0, "num_beams": 4, "length_penalty": 2.0, "max_length": 50}
    folder = make_hugging_face(tmp_path / "m", config={**older, "resid_pdrop": 0.1})
    rules = {"no_repeat_ngram_size": 3, "bad_words_ids": ((5,),), "repetition_penalty": 2.0}
    assert parameters(folder, None) == Parameters(do_sample=True, top_k=40, **rules)
    assert caplog.messages == ["config.json: num_beams is not supported and is ignored"]
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    assert parameters(folder, None) == Parameters()
    (folder / "generation_config.json").unlink()
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", fields | {"repetition_penalty": -1})
    assert reading.refused(folder).startswith("config.json: repetition_penalty must be")


def test_every_setting_that_is_not_known_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changing = {"token_healing": True, "exponential_decay_length_penalty": [5, 1.1], "새것": 1}
    harmless = {"token_healing": False, "top_h": None, "use_cache": True, "num_return_sequences": 1}
    for settings, warned in ((changing, True), (harmless, False)):
        folder = make_hugging_face(tmp_path / str(warned), generation_config=settings)
        caplog.clear()
        open_artifact(folder)
        wanted = [f"generation_config.json: {n} is not supported and is ignored" for n in settings]
        assert caplog.messages == (wanted if warned else [])


def test_a_wrong_generation_config_is_named(v2: Path) -> None:
    for content, reason in (
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1"),
        ({"do_sample": True, "temperature": -1}, "temperature must be from 0"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ):
        write_json(v2 / "generation_config.json", content)
        message = reading.refused(v2)
        assert message.startswith("generation_config.json: ")
        assert reason in message


# In the engine


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine(backend="native", precision="fp32", memory_mib=256)


def test_a_stop_token_ends_an_answer_and_both_ends_are_stripped(
    engine: Engine, tmp_path: Path
) -> None:
    folder = make_talkative(tmp_path / "m", seed=3, vocab=160)

    def answer(**fields: Any) -> Request:
        name = str(fields)
        engine.load(name, str(generation(folder, **fields)))
        return Request(engine, name, "오늘은", max_new_tokens=20).wait()

    free = answer()
    at, token = next((i, t) for i, t in enumerate(free.ids()) if i > 3 and t not in free.ids()[:i])
    stop = SentencePieceTokenizer(folder / "kogpt2.spiece")._pieces[token]
    stopped = answer(stop_tokens=[stop])
    assert stopped.ids() == free.ids()[: at + 1]
    assert stopped.finish_reason() == "stop"
    assert stopped.text() == "".join(t.text for t in free.tokens[:at])

    strip = [free.text()[:2], free.text()[-1]]
    either = "|".join(map(re.escape, strip))
    stripped = answer(strip=strip)
    expected = re.sub(f"({either})+$", "", re.sub(f"^({either})+", "", free.text()))
    assert stripped.text() == expected != free.text()
    assert len(stripped.ids()) == 20
