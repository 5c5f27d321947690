"""Generation parameters are checked one by one; errors name the field and what is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.form import CHECKS as FORMS
from common.form import Form
from common.parameters import CHECKS, Parameters


def refused(given: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        Parameters.parse(given)
    return caught.value.message


@pytest.mark.parametrize("given", [None, {}, dict.fromkeys(CHECKS)])
def test_a_missing_or_null_field_has_its_default(given: Any) -> None:
    assert Parameters.parse(given) == Parameters()


def test_every_field_can_be_given() -> None:
    given: dict[str, Any] = {
        **{"max_new_tokens": 5, "min_new_tokens": 4, "stop": ["끝", "\n"], "ignore_eos": True},
        **{"do_sample": True, "temperature": 0.5, "top_k": 10, "top_p": 0.9, "min_p": 0.05},
        **{"typical_p": 0.9, "seed": 7, "num_return_sequences": 2, "repetition_penalty": 1.2},
        **{"frequency_penalty": -2, "presence_penalty": 0.5, "no_repeat_ngram_size": 3},
        **{"logit_bias": {"3": -100, "17": 2.5}, "logprobs": 3, "choice_logprobs": True},
        **{"return_full_text": True, "decoder_input_details": True},
        **{"bad_words": ["욕", " 나쁜 말"], "bad_words_ids": [[3], [5, 6]]},
        **{"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3},
        **{"dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n", "。"]},
    }
    assert set(given) == CHECKS.keys() - FORMS.keys()
    given |= {"json_schema": {"type": "string"}}
    lists = {name: tuple(given[name]) for name in ("stop", "bad_words", "dry_sequence_breakers")}
    lists |= {"logit_bias": ((3, -100.0), (17, 2.5)), "bad_words_ids": ((3,), (5, 6))}
    assert dataclasses.asdict(Parameters.parse(given)) == {
        **{name: value for name, value in given.items() if name not in FORMS},
        **lists,
        "form": {"kind": "json_schema", "source": ('{"type":"string"}',)},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choice": "긍정"}, "choice must be a list of texts"),
        ({"choice": ["긍정", ""]}, "choice must be a list of texts that are not empty"),
        ({"choice": ["긍정", 1]}, "choice must be a list of texts"),
        ({"choice": [str(i) for i in range(1001)]}, "choice has 1001 texts, at most 1000"),
        ({"choice": ["가" * 70_000]}, "choice has 70000 characters, at most 65536"),
        ({"regex": ""}, "regex must be text that is not empty"),
        ({"regex": ["a"]}, "regex must be text that is not empty, is a list"),
        ({"grammar": {}}, "grammar must be text that is not empty, is an object"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": '"가"'}, "json_schema must be a JSON schema, is a string"),
        ({"json_schema": False}, "json_schema must be a JSON schema, is a boolean"),
        ({"json_schema": []}, "json_schema must be a JSON schema, is a list"),
        ({"json_schema": "[" * 70_000}, "json_schema is no JSON"),
        ({"choice": ["a"], "regex": "a"}, "choice and parameters.regex are given"),
    ],
)
def test_a_wrong_form_is_refused_with_what_it_must_be(given: Any, message: str) -> None:
    assert f"parameters.{message}" in refused(given)


def test_a_requests_form_replaces_the_models_own() -> None:
    own = {"choice": ["긍정", "부정"]}
    assert Parameters.parse({}, own).form == Form("choice", ("긍정", "부정"))
    assert Parameters.parse({"regex": "a"}, own).form == Form("regex", ("a",))
    assert Parameters.parse({"choice": []}, own).form is None
    for given in ({"choice": [], "regex": "가+"}, {"regex": "가+", "choice": []}):
        assert Parameters.parse(given, own).form == Form("regex", ("가+",))
    assert Parameters.parse({"choice": None}, own).form is not None


INTEGERS = (
    *("max_new_tokens", "top_k", "seed", "num_return_sequences", "logprobs", "min_new_tokens"),
    *("no_repeat_ngram_size", "dry_allowed_length", "dry_penalty_last_n"),
)
NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("dry_multiplier", "dry_base"),
)
ABOVE_0 = ("top_p", "typical_p", "repetition_penalty")
BOOLEANS = ("do_sample", "return_full_text", "decoder_input_details", "ignore_eos")
TEXTS = ("stop", "bad_words", "dry_sequence_breakers")
INF, NAN = float("inf"), float("nan")
WRONG_TYPES: list[tuple[tuple[str, ...], str, list[Any]]] = [
    (INTEGERS, "an integer", ["3", 0.5, INF, NAN, True, False, [3], {}]),
    (NUMBERS, "a number", ["1", True, False, [1], {}]),
    (BOOLEANS, "true or false", [0, 1, "true", [], {}]),
    (TEXTS, "a string or a list of strings", [1, True, {}, [1], ["a", None], [["a"]]]),
    (("bad_words_ids",), "a list of lists of token ids", [1, "가", {}, [1], ["a"], [[1], 2]]),
    (("bad_words_ids",), "an integer", [[["1"]], [[True]], [[0.5]]]),
    (("logit_bias",), "an object", [[[7, 1]]]),
    (("logit_bias.7",), "", [101, -100.5, "1", None, True, NAN]),
]


@pytest.mark.parametrize(
    ("field", "kind", "values"),
    [(field, kind, values) for fields, kind, values in WRONG_TYPES for field in fields],
)
def test_a_value_of_another_type_is_refused(field: str, kind: str, values: list[Any]) -> None:
    name, _, token = field.partition(".")
    for value in values:
        given = {token: value} if token else value
        assert f"parameters.{field} must be {kind}" in refused({name: given})


def test_parameters_are_an_object_of_known_fields() -> None:
    for given in ([], "greedy", 1, True, 0.5):
        assert "parameters must be a JSON object" in refused(given)
    message = refused({"max_tokens": 3})
    assert "parameters.max_tokens is not known" in message
    assert "max_new_tokens" in message
    assert "parameters.온도" in refused({"온도": None})


def test_an_answer_cannot_have_to_be_longer_than_it_may_be() -> None:
    message = refused({"max_new_tokens": 5, "min_tokens": 6})
    assert message == "parameters.min_new_tokens is 6, must be at most max_new_tokens, 5"
    assert Parameters.parse({"max_new_tokens": 5, "min_new_tokens": 5}).min_new_tokens == 5
    # A model's own least is no reason to refuse a request for less.
    assert Parameters.parse({"max_new_tokens": 5}, {"min_new_tokens": 6}).max_new_tokens == 5


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1_000_001],
    "top_k": [-2, 1e300],
    "seed": [-1, 2**63],
    "num_return_sequences": [0, 17],
    "logprobs": [-1, 21],
    **{field: [-0.5, 1e9, 10**400, NAN, INF, -INF] for field in NUMBERS},
    "dry_penalty_last_n": [-2],
    "no_repeat_ngram_size": [-1],
    "bad_words": [["a", ""], "a" * 65, ["a"] * 257],
    "bad_words_ids": [[[]], [[-1]], [[1] * 1025]],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "presence_penalty": [-2.1, 2.1],
    "logit_bias": [{str(i): 0 for i in range(1025)}, {"가": 1}, {"-1": 1}],
    "stop": ["", ["a", ""], "a" * 257, ["a"] * 17],
}
for name in ABOVE_0:
    OUT_OF_RANGE[name] += [0, 0.0]
for name, value in (("top_p", 1.0001), ("typical_p", 1.0001), ("dry_base", 0.99)):
    OUT_OF_RANGE[name].append(value)


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(field: str) -> None:
    for value in OUT_OF_RANGE[field]:
        assert f"parameters.{field} " in refused({field: value})


AT_THE_END_OF_ITS_RANGE: dict[str, list[Any]] = {
    "max_new_tokens": [1],
    "presence_penalty": [-2],
    "frequency_penalty": [2],
    "top_k": [0],
    "top_p": [1],
    "temperature": [100],
    "min_p": [0, 1],
    "seed": [0, 2**63 - 1],
    "logprobs": [0, 20],
    "stop": [["가" * 256], []],
}


@pytest.mark.parametrize("field", AT_THE_END_OF_ITS_RANGE)
def test_the_ends_of_a_range_belong_to_it(field: str) -> None:
    for value in AT_THE_END_OF_ITS_RANGE[field]:
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(Parameters.parse({field: value}), field) == expected


def test_other_spellings_of_a_value_are_taken() -> None:
    assert Parameters.parse({"stop": "끝"}).stop == ("끝",)
    assert Parameters.parse({"top_k": -1}).top_k == 0  # off
    tokens = Parameters.parse({"max_new_tokens": 3.0}).max_new_tokens  # JSON has one kind of number
    assert (tokens, type(tokens)) == (3, int)


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        ({}, False),
        ({"repetition_penalty": 1.5, "logprobs": 1}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"typical_p": 0.9}, True),
        ({"no_repeat_ngram_size": 3, "dry_multiplier": 1, "min_tokens": 2}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "top_p": 0.9, "seed": 1, "do_sample": True}, False),
        ({"seed": 1}, True),
        ({"seed": 1, "do_sample": False}, False),
        ({"do_sample": True}, True),
    ],
)
def test_sampling_parameters_imply_sampling(given: Any, sampled: bool) -> None:
    assert Parameters.parse(given).do_sample is sampled


def test_several_greedy_answers_are_refused_since_they_would_be_equal() -> None:
    message = refused({"num_return_sequences": 2})
    assert "parameters.num_return_sequences" in message
    assert "do_sample" in message
    assert Parameters.parse({"num_return_sequences": 2, "seed": 1}).num_return_sequences == 2


def test_a_temperature_of_0_is_greedy_in_a_request_and_in_a_model() -> None:
    assert Parameters.parse({"temperature": 0}) == Parameters()
    drawn = {"do_sample": True, "temperature": 0.7}
    assert Parameters.parse({"temperature": 0}, drawn) == Parameters()
    assert Parameters.parse({"seed": 1}, {"temperature": 0}).do_sample is False
    assert Parameters.parse({"temperature": 0.7}, {"temperature": 0}).do_sample is True


def test_names_of_other_servers_are_known() -> None:
    given = {"repeat_penalty": 1.2, "stop_words": ["끝"], "bad_words": [], "min_tokens": 2}
    expected = Parameters(repetition_penalty=1.2, stop=("끝",), min_new_tokens=2)
    assert Parameters.parse(given) == Parameters.parse({}, given) == expected
    assert Parameters.parse({"stop_words": "", "bad_words": ""}) == Parameters()
    assert "parameters.repeat_penalty must be" in refused({"repeat_penalty": 0})
    assert "parameters.min_tokens must be" in refused({"min_tokens": -1})


def test_two_names_of_one_parameter_must_agree() -> None:
    for given in ({"stop": ["끝"], "stop_words": ["봄"]}, {"stop_words": ["봄"], "stop": ["끝"]}):
        message = refused(given)
        assert message == (
            "parameters.stop_words and parameters.stop are two names of one parameter, but differ;"
            " send one of them"
        )
    assert "repeat_penalty" in refused({"repeat_penalty": 1.2, "repetition_penalty": 1})
    given = {"stop": "끝", "stop_words": ["끝"], "min_tokens": 2, "min_new_tokens": 2.0}
    assert Parameters.parse(given) == Parameters(stop=("끝",), min_new_tokens=2)
    assert Parameters.parse({"stop": "끝", "stop_words": []}).stop == ("끝",)
