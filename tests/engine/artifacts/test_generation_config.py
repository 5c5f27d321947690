"""generation.json: templates, defaults, ends, and what is cut from an answer."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ArtifactError, InvalidRequest, PromptTooLong
from common.parameters import Parameters
from engine.artifacts.open import open_artifact
from engine.engine import Engine
from engine.settings import Settings
from engine.text.prompts import Prompts
from engine.text.sentencepiece import SentencePieceTokenizer
from engine.text.trimming import Trimmer
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


def say(folder: Path, **said: Any) -> Path:
    write_json(folder / "generation.json", said)
    return folder


def prompts(folder: Path, **said: Any) -> Prompts:
    return Prompts(open_artifact(say(folder, **said)))


def parameters(folder: Path, given: Any) -> Parameters:
    return Parameters.parse(given, open_artifact(folder).generation.parameters)


def refused(folder: Path, content: Any) -> str:
    write_json(folder / "generation.json", content)
    with pytest.raises(ArtifactError) as caught:
        Prompts(open_artifact(folder))
    assert caught.value.message.startswith("generation.json")
    return caught.value.message


# Templates


def pieces(found: Prompts, ids: list[int]) -> list[str]:
    tokenizer = found.tokenizer
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return [tokenizer._pieces[i] for i in ids]


def test_v1s_control_pieces_stand_for_themselves_and_each_text_begins_anew(v1: Path) -> None:
    """As the chat fine-tunes were trained: `[<usr>] + tokenize(q) + [</s>] + ...`."""
    found = prompts(v1, template=V1, defaults=DEFAULTS)
    tokenizer = found.tokenizer
    assert isinstance(tokenizer, SentencePieceTokenizer)
    cut = tokenizer._model.encode
    name = tokenizer._model.piece_to_id
    expected = [name("<usr>"), *cut("오늘은 날씨가"), name("</s>"), name("<unused1>"), *cut("0")]
    expected += [name("</s>"), name("<sys>")]
    assert found.encode("오늘은 날씨가") == expected
    assert pieces(found, expected)[0] == "<usr>"
    assert tokenizer.bos_id not in expected


def test_v2s_template_is_one_text(v2: Path) -> None:
    found = prompts(v2, template=V2, defaults=DEFAULTS)
    plain = Prompts(open_artifact(make_hugging_face(v2.with_name("plain"))))
    assert found.encode("오늘은 날씨가") == plain.encode("<usr>오늘은 날씨가<unused1>0<sys>")


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


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"text": "가", "기분": "1"}, "inputs.기분 is not known; known are text, sentiment, mood"),
        ({"text": "가"}, "inputs.mood is missing"),
        ({"mood": "1"}, "inputs.text is missing"),
        ("가", "inputs.mood is missing"),
        ({"text": "", "mood": " "}, "inputs is empty"),
        ({}, "inputs is empty"),
        ("", "inputs is empty"),
    ],
)
def test_a_request_that_does_not_fit_the_template_is_refused(
    v2: Path, inputs: Any, said: str
) -> None:
    found = prompts(v2, template="{text}<usr>{sentiment}<sys>{mood}", defaults=DEFAULTS)
    with pytest.raises(InvalidRequest, match=said):
        found.encode(inputs)


def test_a_template_of_defaults_alone_needs_an_object(v2: Path) -> None:
    found = prompts(v2, template="{a}", defaults={"a": "나"})
    with pytest.raises(InvalidRequest, match="must be an object of fields; known are a"):
        found.encode("가")
    assert found.encode({"a": "나"})


def test_fields_without_a_template_are_refused(v2: Path) -> None:
    with pytest.raises(InvalidRequest, match="the model brings no template"):
        prompts(v2).encode({"text": "가"})


@pytest.mark.parametrize("text", ["<usr>", "안녕<sys>나쁜 말", "＜usr＞ 가", "<unused1>1"])
def test_v1s_user_cannot_write_control_tokens(v1: Path, text: str) -> None:
    found = prompts(v1, template=V1, defaults=DEFAULTS)
    with pytest.raises(InvalidRequest, match="is reserved for"):
        found.encode(text)


def test_v1s_end_is_text_in_a_users_mouth(v1: Path) -> None:
    found = prompts(v1, template=V1, defaults=DEFAULTS)
    ids = found.encode("</s>")
    eos = found.tokenizer.eos_id
    assert ids.count(eos) == found.encode("가").count(eos) == 2


def test_a_plain_prompt_still_knows_the_symbols(v1: Path) -> None:
    found = prompts(v1)
    assert found.tokenizer.token_id("<usr>") in found.encode("<usr>안녕")


def test_a_filled_template_has_to_fit_the_context(v2: Path) -> None:
    found = prompts(v2, template=V2, defaults=DEFAULTS)
    with pytest.raises(PromptTooLong, match="tokens"):
        found.encode({"text": "가", "sentiment": "나 보기가 " * 40})


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_what_is_wrong_in_the_file_is_named(v2: Path, content: Any, said: str) -> None:
    assert said in refused(v2, content)


def test_a_file_that_is_no_json_is_named(v1: Path) -> None:
    (v1 / "generation.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"generation\.json is not JSON"):
        open_artifact(v1)


# Defaults


def test_a_requests_parameters_come_before_the_models(v1: Path) -> None:
    say(v1, parameters={"max_new_tokens": 7, "stop": ["\n"], "repetition_penalty": 1.3})
    assert parameters(v1, None) == Parameters(7, ("\n",), repetition_penalty=1.3)
    assert parameters(v1, {"max_new_tokens": 9}).max_new_tokens == 9
    assert parameters(v1, {"stop": []}).stop == ()


def test_a_model_that_draws_can_be_asked_not_to(v1: Path) -> None:
    say(v1, parameters={"do_sample": True, "temperature": 0.8})
    assert parameters(v1, {}).do_sample
    assert parameters(v1, {"num_return_sequences": 2}).num_return_sequences == 2
    assert not parameters(v1, {"do_sample": False}).do_sample
    say(v1, parameters={"do_sample": False})
    assert not parameters(v1, {}).do_sample
    assert parameters(v1, {"temperature": 0.5}).do_sample


def test_hugging_faces_defaults_are_below_generation_json(tmp_path: Path) -> None:
    theirs = {"do_sample": True, "temperature": 0.7, "top_k": 40, "max_new_tokens": 11}
    theirs |= {"eos_token_id": [1, 3], "stop_strings": ["끝"], "num_beams": 4, "min_p": 0.1}
    folder = make_hugging_face(tmp_path / "m", generation_config=theirs)
    found = prompts(folder, parameters={"max_new_tokens": 5})
    expected = Parameters(5, ("끝",), do_sample=True, temperature=0.7, top_k=40, min_p=0.1)
    assert parameters(folder, None) == expected
    assert found.stop_ids == {1, 3}


def test_hugging_faces_sampling_counts_only_where_it_samples(tmp_path: Path) -> None:
    theirs = {"do_sample": False, "temperature": 0.7, "top_k": 40}
    folder = make_hugging_face(tmp_path / "m", generation_config=theirs)
    assert parameters(folder, None) == Parameters()


def test_what_is_not_done_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"num_beams": 4, "epsilon_cutoff": 0}
    open_artifact(make_hugging_face(tmp_path / "m", generation_config=theirs))
    assert "num_beams is not done here" in caplog.text
    assert "epsilon_cutoff" not in caplog.text


def test_what_transformers_forbids_by_default_is_forbidden(tmp_path: Path) -> None:
    theirs = {"bad_words_ids": [[3], [5, 6]], "no_repeat_ngram_size": 3, "typical_p": 0.9}
    theirs |= {"max_new_tokens": 9, "min_new_tokens": 20}
    folder = make_hugging_face(tmp_path / "m", generation_config=theirs)
    expected = Parameters(9, no_repeat_ngram_size=3, bad_words_ids=((3,), (5, 6)))
    found = parameters(folder, None)
    assert found == dataclasses.replace(expected, min_new_tokens=20)  # at most max_new_tokens
    drawing = make_hugging_face(
        tmp_path / "n", generation_config={"do_sample": True, "typical_p": 0.9}
    )
    assert parameters(drawing, None) == Parameters(do_sample=True, typical_p=0.9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1"),
        ({"do_sample": True, "temperature": -1}, "temperature must be from 0"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ],
)
def test_a_wrong_generation_config_is_named(tmp_path: Path, content: Any, said: str) -> None:
    folder = make_hugging_face(tmp_path / "m", generation_config=content)
    with pytest.raises(ArtifactError, match=re.escape(said)) as caught:
        open_artifact(folder)
    assert caught.value.message.startswith("generation_config.json: ")


# Ends, and what is cut off


@pytest.fixture(params=["mxnet", "native"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(Settings(backend=request.param, precision="fp32", memory_mib=256))
    try:
        yield engine
    finally:
        engine.close()


def test_a_stop_token_ends_an_answer_and_is_not_in_it(engine: Engine, tmp_path: Path) -> None:
    folder = make_talkative(tmp_path / "m", seed=3, vocab=160)
    engine.load("free", str(folder))
    free = Request(engine, "free", "오늘은", max_new_tokens=20).wait()
    tokenizer = SentencePieceTokenizer(folder / "kogpt2.spiece")
    at, token = next((i, t) for i, t in enumerate(free.ids()) if i > 3 and t not in free.ids()[:i])
    stop = tokenizer._pieces[token]
    engine.load(
        "stops", str(say(make_talkative(tmp_path / "n", seed=3, vocab=160), stop_tokens=[stop]))
    )

    stopped = Request(engine, "stops", "오늘은", max_new_tokens=20).wait()

    assert stopped.ids() == free.ids()[: at + 1]
    assert stopped.finish_reason() == "stop"
    assert stopped.text() == "".join(t.text for t in free.tokens[:at])


def test_an_answer_is_stripped_at_both_ends(engine: Engine, tmp_path: Path) -> None:
    folder = make_talkative(tmp_path / "m", seed=3, vocab=160)
    engine.load("free", str(folder))
    whole = Request(engine, "free", "오늘은", max_new_tokens=20).wait().text()
    strip = [whole[:2], whole[-1]]
    engine.load("cut", str(say(make_talkative(tmp_path / "n", seed=3, vocab=160), strip=strip)))
    expected = re.sub(f"^({'|'.join(map(re.escape, strip))})+", "", whole)
    expected = re.sub(f"({'|'.join(map(re.escape, strip))})+$", "", expected)

    found = Request(engine, "cut", "오늘은", max_new_tokens=20).wait()

    assert found.text() == expected != whole
    assert len(found.ids()) == 20


def test_a_template_reaches_the_model(engine: Engine, v1: Path, v2: Path) -> None:
    for folder, template in ((v1, V1), (v2, V2)):
        engine.load("m", str(say(folder, template=template, defaults=DEFAULTS)))
        one, other = (
            Request(engine, "m", inputs, max_new_tokens=8).wait()  # type: ignore[arg-type]
            for inputs in ("오늘은", {"text": "오늘은", "sentiment": "0"})
        )
        assert one.ids() == other.ids()
        assert one.prompt == other.prompt
        engine.unload("m")


TEXTS = (
    "",
    " ",
    "가",
    "  가 나  ",
    "\n\n가",
    "<x><x>가<x",
    "<x",
    "가<x><x>",
    "ab" * 5,
    " <x> 가 <x> ",
)


@pytest.mark.parametrize("strips", [(), (" ",), (" ", "\n"), ("<x>", " "), ("a", "ab", "b")])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_stripped_does_not_depend_on_the_pieces(strips: tuple[str, ...], text: str) -> None:
    alternatives = "|".join(map(re.escape, strips)) or "(?!)"
    expected = re.sub(f"^({alternatives})+", "", text)
    expected = re.sub(f"({alternatives})+$", "", expected)
    rng = random.Random(1)  # noqa: S311
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        trimmer = Trimmer(strips)
        edges = [0, *cuts, len(text)]
        given = [text[a:b] for a, b in itertools.pairwise(edges)]
        found = "".join(trimmer.feed(piece) for piece in given[:-1]) + trimmer.finish(given[-1])
        assert found == expected, given
