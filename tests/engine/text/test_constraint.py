"""Constrained decoding: what is drawn at random among the allowed tokens has the form."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import regex

from common.errors import EngineUnavailable, InvalidRequest, Overloaded
from common.form import MAX_CHARACTERS, Form
from common.form import choice as choice_of
from common.form import grammar as grammar_of
from common.form import json_schema as schema_of
from common.form import regex as regex_of
from engine.text import constraint as constraints
from engine.text import form_child
from engine.text.constraint import MAX_PROCESSES, Constraint, Vocabulary
from engine.text.form_child import begins_with_space
from engine.text.table import BYTES, PROCESS, RUNS, SEPARATE, Table
from tests.engine.engines import WAIT_S
from tests.processes import eventually, has_ended

WORDS = ["긍정", " 긍정", "부정", " 부정", "중립", "산에는", " 꽃", "이름", "김소월", '{"', '":']
WORDS += ['", "', "true", "false", "null", " ", "  ", "나이", "12", "3.5", "한", "글", "\n"]
END = 1
KOREAN = [*WORDS, '"']


def table_of(kind: str, words: list[str] = WORDS) -> Table:
    """Control tokens, each byte, and words."""
    pieces = [b"<s>", b"</s>", b"<unk>", *(bytes([i]) for i in range(256))]
    pieces += [word.encode() for word in words]
    return Table(kind, pieces, silent=range(3), byte_ids=() if kind == BYTES else range(3, 259))


@contextlib.contextmanager
def vocabulary_of(table: Table, stop_ids: Sequence[int] = (END,)) -> Iterator[Vocabulary]:
    vocabulary = Vocabulary(table, stop_ids)
    yield vocabulary
    vocabulary.end()


@pytest.fixture(scope="module", params=[BYTES, RUNS, SEPARATE])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    with vocabulary_of(table_of(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def korean() -> Iterator[Vocabulary]:
    """A Korean tokenizer without byte tokens: other characters cannot be written."""
    pieces = [b"<s>", b"</s>", *(w.encode() for w in KOREAN)]
    with vocabulary_of(Table(RUNS, pieces, range(2))) as made:
        yield made


def constrain(vocabulary: Vocabulary, form: Form) -> Constraint:
    return vocabulary.constrain(form).result(WAIT_S).pop()  # so that nothing else refers to it


def advance(constraint: Constraint, token: int) -> None:
    constraint.advance(token)
    assert constraint.wait(WAIT_S)
    constraint.check()


def draw(
    vocabulary: Vocabulary, form: Form, seed: int = 0, most: int = 200, end: float = 0.0
) -> tuple[str, bool]:
    """A text of random allowed tokens, and whether it is complete. `end` is added to the end
    token's logit."""
    table, random = vocabulary._table, np.random.default_rng(seed)
    constraint, ids = constrain(vocabulary, form), list[int]()
    complete = False
    while not complete and len(ids) < most:
        logits = random.standard_normal(len(table) + 5).astype(np.float32)
        logits[259:] += 2  # words rather than bytes
        logits[END] += end
        values, tokens = constraint.allowed(logits)
        assert np.array_equal(values, logits[tokens])
        if constraint.forced is not None:
            assert list(tokens) == [constraint.forced]
        token = int(tokens[values.argmax()])
        assert constraint.likeliest(logits) == token
        if token == END:
            return table.text(ids), True
        ids.append(token)
        advance(constraint, token)
        complete = constraint.complete
    return table.text(ids), complete


def whole(vocabulary: Vocabulary, form: Form, count: int = 30) -> list[str]:
    found = [draw(vocabulary, form, seed, end=1.0) for seed in range(count)]
    texts = [text for text, complete in found if complete]
    assert len(texts) > count / 2
    return texts


def test_a_choice_is_one_of_its_texts(vocabulary: Vocabulary) -> None:
    texts = ("긍정", "부정", '"인용" \\', "a\nb")
    found = {text.removeprefix(" ") for text in whole(vocabulary, Form("choice", texts))}
    assert found <= {*texts}
    assert len(found) >= 3
    form = Form("choice", (" 긍정", "부정"))  # it begins with a space, which is written as it is
    assert not begins_with_space(form)
    assert set(whole(vocabulary, form)) == {" 긍정", "부정"}
    longer = whole(vocabulary, Form("choice", ("산", "산에는")), 60)
    assert {text.removeprefix(" ") for text in longer} == {"산", "산에는"}


@pytest.mark.parametrize("pattern", [r"\d{2,4}-\d+", "(긍|부)정", "[가-힣]{2} 꽃", r"a.c"])
def test_a_regular_expression_is_matched_as_a_whole(vocabulary: Vocabulary, pattern: str) -> None:
    for text in whole(vocabulary, Form("regex", (pattern,))):
        assert re.fullmatch(pattern, text), text


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "이름": {"type": "string", "maxLength": 5},
        "나이": {"type": "integer", "minimum": 0, "maximum": 120},
        "감정": {"enum": ["긍정", "부정", None]},
        "목록": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["이름", "나이", "감정", "목록"],
    "additionalProperties": False,
}


def test_a_schema_gives_json_of_its_own(vocabulary: Vocabulary) -> None:
    for text in whole(vocabulary, schema_of("", SCHEMA)):
        found = json.loads(text)
        assert list(found) == SCHEMA["required"]
        assert len(found["이름"]) <= 5
        assert 0 <= found["나이"] <= 120
        assert found["감정"] in ("긍정", "부정", None)
        assert len(found["목록"]) <= 2
        assert all(type(x) is bool for x in found["목록"])
        assert not re.search(r"\n|  |[{\[] ", re.sub(r'"[^"]*"', "", text)), text
    schema = {**SCHEMA, "x-guidance": {"item_separator": ",", "key_separator": " : "}}
    for text in whole(vocabulary, schema_of("", schema), 5):
        bare = re.sub(r'"[^"]*"', '""', text)
        assert '"" : ' in bare
        assert ", " not in bare
        assert sorted(json.loads(text)) == sorted(SCHEMA["required"])


def object_of(name: str, *values: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"enum": list(values)}}, "required": [name]}


NAMES, MORE = object_of("이름", "가", "나"), object_of("나이", 1, 2)


def draws(vocabulary: Vocabulary, schema: Any, count: int = 30) -> list[dict[str, Any]]:
    """Complete answers of a schema."""
    return list(map(json.loads, whole(vocabulary, schema_of("", schema), count)))


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (NAMES, {"이름"}),
        ({"type": "object", "properties": {}}, set()),
        ({"$ref": "#/$defs/a", "$defs": {"a": NAMES}}, {"이름"}),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": NAMES}}, {"이름"}),
        ({"anyOf": [NAMES, MORE]}, {"이름", "나이"}),
    ],
)
def test_only_properties_that_a_schema_names_are_written(
    vocabulary: Vocabulary, schema: Any, names: set[str]
) -> None:
    found = draws(vocabulary, schema)
    assert set().union(*found) == names
    assert {len(value) for value in found} == {min(len(names), 1)}


def test_a_schema_that_needs_other_properties_has_them(vocabulary: Vocabulary) -> None:
    for change in ({"additionalProperties": {"type": "boolean"}}, {"required": ["나이"]}):
        assert any(set(value) - {"이름"} for value in draws(vocabulary, {**NAMES, **change}, 8))
    for combined in (
        {"allOf": [NAMES, {"$ref": "#/$defs/more"}]},
        {**NAMES, "$ref": "#/$defs/more"},
    ):
        found = draws(vocabulary, {**combined, "$defs": {"more": MORE}})
        assert found
        assert all({"이름", "나이"} <= set(value) for value in found)
    # Any JSON, whose texts are long
    assert all(isinstance(value, dict) for value in draws(vocabulary, {"type": "object"}, 5))
    assert draws(vocabulary, True, 5)


LARK = 'start: "산에는" FLOWER+\nFLOWER: " 꽃"'
GBNF = 'root ::= "산에는" flower+\nflower ::= " 꽃"'


@pytest.mark.parametrize("text", [LARK, GBNF, f"%llguidance {{}}\n{LARK}"])
def test_a_grammar_in_the_syntax_of_lark_or_of_llama_cpp(vocabulary: Vocabulary, text: str) -> None:
    for found in whole(vocabulary, grammar_of("", text)):
        assert re.fullmatch("산에는( 꽃)+", found)


FEELINGS = ("긍정", "부정", "긍정적이다")
OBJECT = {
    "type": "object",
    "properties": {
        "감정": {"enum": ["긍정", "부정"]},
        "수": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["감정", "수"],
    "additionalProperties": False,
}
NUMBERS = r"\[(1|22|333)(, ?(1|22|333)){0,2}\]"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (Form("choice", FEELINGS), f" ?({'|'.join(FEELINGS)})"),
        (Form("regex", ("[가나다라마 ]{3,12}[.!]",)), "[가나다라마 ]{3,12}[.!]"),
        (Form("regex", (r"\d{2,4}-\d{4}",)), "[0-9]{2,4}-[0-9]{4}"),
        (Form("regex", ("(산에는 꽃|갈 봄)+",)), "(산에는 꽃|갈 봄)+"),
        (schema_of("", OBJECT), rf' ?\{{"감정": ?"(긍정|부정)", ?"수": ?{NUMBERS}\}}'),
    ],
    ids=str,
)
def test_every_token_that_can_go_on_is_allowed(
    vocabulary: Vocabulary, form: Form, pattern: str
) -> None:
    """As by the partial matches of an expression, of another library."""
    expression, table = regex.compile(pattern), vocabulary._table
    letters = {letter: letter.encode() for letter in {*pattern, *"0123456789"}}

    def matches(written: bytes, partial: bool) -> bool:
        try:
            text, length = codecs.utf_8_decode(written)
        except UnicodeDecodeError:
            return False
        texts, tail = [text], written[length:]  # of a character that is not complete
        if tail:
            texts = [text + letter for letter, code in letters.items() if code.startswith(tail)]
        return any(expression.fullmatch(t, partial=partial) for t in texts if partial or not tail)

    for seed in range(3):
        constraint, written = constrain(vocabulary, form), b""
        rng = np.random.default_rng(seed)
        for _ in range(20):  # an answer need not end
            if constraint.complete:
                assert matches(written, False)
                break
            expected = {t for t in range(3, len(table)) if matches(written + table.piece(t), True)}
            if matches(written, False):
                expected.add(END)
            found = set(constraint.allowed(np.zeros(300, np.float32))[1].tolist())
            assert found == expected, written
            token = int(rng.choice(sorted(found - {END})))
            written += table.piece(token)
            advance(constraint, token)


def test_tokens_that_end_within_a_character_are_allowed(vocabulary: Vocabulary) -> None:
    constraint = constrain(vocabulary, Form("regex", ("[가나다]",)))
    byte = 3 + 0xEA  # the first of 가, U+AC00
    assert byte in constraint.allowed(np.zeros(300, np.float32))[1]
    advance(constraint, byte)
    assert constraint.forced == 3 + 0xB0
    advance(constraint, 3 + 0xB0)
    assert not constraint.complete
    advance(constraint, 3 + 0x80)
    assert constraint.complete


def test_control_tokens_are_no_text(vocabulary: Vocabulary) -> None:
    form = Form("regex", ("(.|\n)*",))
    tokens = constrain(vocabulary, form).allowed(np.zeros(300, np.float32))[1]
    assert not {0, 2} & set(tokens)
    assert END in tokens  # as its end
    assert tokens.max() == len(vocabulary._table) - 1


def test_without_an_end_token_a_form_that_may_go_on_does() -> None:
    with vocabulary_of(table_of(BYTES), []) as vocabulary:
        assert draw(vocabulary, Form("regex", ("a{1,3}",))) == ("aaa", True)


def test_answers_of_one_form_do_not_share_their_state(vocabulary: Vocabulary) -> None:
    form = Form("choice", ("긍정", "부정"))
    first, second = constrain(vocabulary, form), constrain(vocabulary, form)
    advance(first, 259)
    assert (first.complete, second.complete) == (True, False)
    assert {259, 261} <= set(second.allowed(np.zeros(300, np.float32))[1])


REFUSED = [
    (Form("regex", ("[a-c]+",)), "none of the model's tokens can write 'a'$"),
    (Form("regex", ("긍정[a-c]",)), "none of the model's tokens can write 'a' behind '긍정'"),
    (Form("regex", ("(긍정|부정|산에는 꽃)뷁",)), "can write '뷁' behind '산에는 꽃'"),
    (Form("choice", ("사랑",)), "none of the model's tokens can write '사'$"),
    (Form("regex", ("긍정( 꽃){1,9}을",)), "can write '을' behind '긍정( 꽃){9}'"),
    (Form("regex", ("(",)), "unclosed group"),
    (Form("regex", ("(?=긍)정",)), "look-around"),
    (Form("regex", ("",)), "without text"),
    (schema_of("", {"type": "letter"}), "letter"),
    (schema_of("", {"$ref": "https://example.com/schema"}), "ref"),
    (schema_of("", {"not": {"type": "string"}}), "not"),
    (Form("grammar", ("start: thing",)), "thing"),
    (Form("grammar", ("root ::= ",)), "without text"),
    (Form("grammar", ("root ::= (",)), "cannot be read"),
    (Form("grammar", ("%llguidance {",)), "cannot be read"),
]


def test_what_cannot_be_written_or_read_is_refused_with_the_reason(korean: Vocabulary) -> None:
    for form, message in REFUSED:
        with pytest.raises(InvalidRequest, match=f"parameters.{form.kind}: (?s:.*){message}"):
            constrain(korean, form)
    with pytest.raises(InvalidRequest, match="cannot be held to a form"):
        constrain(Vocabulary(table_of(PROCESS), [END]), Form("regex", ("a",)))
    too_long = f"at most {MAX_CHARACTERS}"
    with pytest.raises(InvalidRequest, match=too_long):
        schema_of("parameters.json_schema", {"enum": ["가" * MAX_CHARACTERS]})
    with pytest.raises(InvalidRequest, match=too_long):
        choice_of("parameters.choice", ["가" * MAX_CHARACTERS, "나"])


def test_a_panic_of_the_library_is_one_sentence() -> None:
    panic = "thread '<unnamed>' panicked at /root/.cargo/src/lib.rs:1:\n가\nstack backtrace:\n 0: x"
    error = form_child._refused(Form("grammar", ("가",)), panic)
    assert error.message == "parameters.grammar: llguidance cannot read it"

    def panics() -> None:
        raise BaseException(panic)  # as PanicException

    with pytest.raises(InvalidRequest, match="grammar: llguidance cannot read it"):
        form_child._guarded(Form("grammar", ("가",)), panics)


WRITABLE = [
    (Form("choice", ("긍정", "부정적", "산에는 꽃", "산에는 풀")), {"긍정", "산에는 꽃"}),
    (Form("regex", ("(긍정|부정뷁)( 꽃|이름a){2}",)), {"긍정 꽃 꽃"}),
    (schema_of("", {"enum": ["긍정", "뷁", "부정", "a"]}), {'"긍정"', '"부정"'}),
]


@pytest.mark.parametrize(("form", "texts"), WRITABLE, ids=["choice", "regex", "schema"])
def test_only_branches_that_the_tokens_can_write_are_begun(
    korean: Vocabulary, form: Form, texts: set[str]
) -> None:
    drawn = [draw(korean, form, seed) for seed in range(30)]
    assert all(complete for _, complete in drawn)
    assert {text.removeprefix(" ") for text, _ in drawn} == texts


def test_the_search_through_a_long_text_ends_within_pythons_limit_of_recursion(
    korean: Vocabulary,
) -> None:
    text, _ = draw(korean, Form("regex", ("[긍정]{1000}",)), 0)
    assert set(text) <= set("긍정")


@pytest.mark.parametrize(
    ("reference", "name"),
    [("#/$defs/주소", "주소"), ("#/$defs/%EC%A3%BC%EC%86%8C", "주소"), ("#/$defs/a b", "a b")],
)
def test_references_may_be_written_as_people_write_them(
    vocabulary: Vocabulary, reference: str, name: str
) -> None:
    schema = object_of("집") | {"$defs": {name: {"enum": ["꽃"]}}}
    schema["properties"] = {"집": {"$ref": reference}}
    assert draws(vocabulary, schema, 3)[0] == {"집": "꽃"}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}, "required": ["a"]}
    return schema


CHOICES = " | ".join(f'"{i}긍정"' for i in range(MAX_CHARACTERS // 16))
INTEGER, LONG = {"type": "integer"}, {"minItems": 1000}
NAMED: list[Any] = [[{"properties": {f"{i}{j}": {}}} for j in range(6)] for i in range(8)]
HOSTILE = {
    "nested groups": regex_of("", "(" * 20_000 + "a" + ")" * 20_000),
    "nested repetition": regex_of("", "((a{1,1000}){1,1000}){1,1000}"),
    "ambiguous repetition": regex_of("", "(([ab]{0,50}c){0,50}d){0,50}"),
    "large automaton": regex_of("", "[ab]*a[ab]{30}[ab]*b[ab]{30}"),
    "look into the past": regex_of("", "(.*a.{200})|(.*b.{300})"),
    "many alternatives": regex_of("", "|".join("a" * (i % 60) + f"{i}" for i in range(1900))),
    "many choices": grammar_of("", f"start: {CHOICES}"),
    "nested rules": grammar_of("", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "left recursion": grammar_of("", 'start: a\na: a a a a a a | "긍정" |'),
    "empty loops": grammar_of("", 'start: a*\na: b*\nb: "긍정"*'),
    "nested GBNF": grammar_of("", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "nested schema": schema_of("", nested(100)),
    "references in a circle": schema_of("", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}),
    "long strings": schema_of("", {"type": "string", "minLength": 100_000}),
    "long lists": schema_of("", {"type": "array", **LONG, "items": INTEGER}),
    "lists of lists": schema_of("", {**LONG, "items": {**LONG, "items": INTEGER}}),
    "combinations": schema_of("", {"allOf": [{"anyOf": named} for named in NAMED]}),
}


# llguidance looks whether the patterns have texts in common, which no limit of its own bounds.
PATTERNS = [f"(.*{letter}.{{7}}b.*)" for letter in "acdefghijklmnopq"]
ENDLESS = schema_of("", {"type": "string", "allOf": [{"pattern": each} for each in PATTERNS]})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_or_stays_small(name: str) -> None:
    with vocabulary_of(table_of(BYTES)) as vocabulary, contextlib.suppress(InvalidRequest):
        draw(vocabulary, HOSTILE[name], most=50)


# Each form has a process


@pytest.fixture
def own() -> Iterator[Vocabulary]:
    """A vocabulary without processes."""
    with vocabulary_of(table_of(BYTES)) as made:
        yield made


def forms(count: int) -> list[Form]:
    return [Form("regex", (f"긍정{{1,{i + 1}}}",)) for i in range(count)]


def process_of(vocabulary: Vocabulary, form: Form) -> psutil.Process:
    """The process of a form that is in use, once it runs."""
    process = vocabulary._processes[form]
    return psutil.Process(eventually(lambda: process._child and process._child.pid))


def test_a_form_that_takes_too_long_is_refused_then_refused_at_once(
    own: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "COMPILE_S", 0.2)
    message = r"parameters\.json_schema: the form .* took more than 0.2 s"
    for _ in range(2):
        future = own.constrain(ENDLESS)
        with pytest.raises(InvalidRequest, match=message):
            future.result(WAIT_S)
        assert not own._processes
    assert future.done()  # without a process
    own._refused.clear()  # as after `REFUSED_S`
    assert not own.constrain(ENDLESS).done()


def test_a_form_that_takes_too_much_memory_is_refused(
    own: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MEMORY_MIB", 16)
    monkeypatch.setattr(constraints, "COMPILE_S", WAIT_S)
    with pytest.raises(InvalidRequest, match=r"json_schema: the form .* took more than 16 MiB"):
        constrain(own, ENDLESS)


def test_a_form_that_is_compiled_delays_no_other_and_ends_with_its_request(
    own: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "COMPILE_S", WAIT_S)
    first, second = own.constrain(ENDLESS), own.constrain(ENDLESS)
    process = process_of(own, ENDLESS)
    assert draw(own, Form("choice", ("긍정", "부정")))[1]
    assert not first.done()
    assert first.cancel()
    assert process.is_running()
    assert second.cancel()
    eventually(lambda: has_ended(process))
    assert not constrain(own, forms(1)[0]).complete


def test_a_mask_that_is_late_ends_the_answers_of_its_form_only(
    own: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MASKS_S", 0.2)
    late, other = forms(2)
    first, second = constrain(own, late), constrain(own, late)
    process_of(own, late).suspend()
    first.advance(259)
    assert draw(own, other)[1]
    for each in (first, second):
        with pytest.raises(InvalidRequest, match=r"regex: the form .* took more than 0.2 s"):
            advance(each, 259)
    with pytest.raises(InvalidRequest, match=r"took more than 0.2 s"):
        constrain(own, late)


def test_a_form_whose_process_is_killed_can_be_used_again(own: Vocabulary) -> None:
    (form,) = forms(1)
    constraint = constrain(own, form)
    process_of(own, form).kill()
    with pytest.raises(EngineUnavailable):
        advance(constraint, 259)
    assert draw(own, form)[1]
    assert own._prepared is not None
    psutil.Process(own._prepared.pid).kill()  # with all forms
    assert draw(own, forms(2)[1])[1]


def test_few_forms_are_in_use_at_once_and_the_idle_ones_make_room(own: Vocabulary) -> None:
    used = [constrain(own, form) for form in forms(MAX_PROCESSES)]
    with pytest.raises(Overloaded, match="other forms are in use"):
        constrain(own, Form("regex", ("꽃",)))
    first = process_of(own, forms(1)[0])
    assert constrain(own, forms(1)[0]) is not None  # in use already
    used.pop(0).close()
    eventually(lambda: not own._processes[forms(1)[0]].num_users)
    assert draw(own, Form("regex", ("꽃",)))[1]
    eventually(lambda: has_ended(first))
    own.end()
    assert not own._processes
    for each in used:
        with pytest.raises(EngineUnavailable):
            advance(each, 259)


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"forced": [-1], "mask": ""}, {"forced": [1 << 40], "mask": ""},
     {"forced": [], "mask": "가"}, {"forced": [], "mask": "AAAA"}, {"forced": 1, "mask": ""}],
)  # fmt: skip
def test_what_a_forms_process_returns_is_checked(value: Any) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):
        constraints.state_of(value, 300)
