"""The console page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.e2e.server import Server, eventually
from tests.e2e.stores import bearer, greedy, running, serving, slow, small
from tests.engine.hugging_face import make_hugging_face
from tests.lazy import openai

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDE_MS = 60_000
CALL, MANAGE = "call-me", "관리-비밀"
FOUR = ["봄", "여름", "시/가을", "겨울"]
SLOW, *LARGE = ["느린", "큰-1", "큰-2"]
BROKEN = "고장"
LABELED = "감정"
PROMPT = "나 보기가 역겨워"
HTML = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with memory for a slow model and a few small ones, not for all three large ones."""
    folder = tmp_path_factory.mktemp("console")
    store = folder / "store"
    for seed, name in enumerate(FOUR):
        small(store / name, seed)
    make_hugging_face(store / LABELED, labels=["부정", "긍정"])
    small(store / BROKEN).joinpath("kogpt2.params").write_bytes(b"nothing")
    for name in (SLOW, *LARGE):
        slow(store / name)
    environment = {"INFERENCE_TOKEN": CALL, "MANAGEMENT_TOKEN": MANAGE}
    environment |= {"ENGINE_MEMORY_MIB": "72", "ENGINE_OVERCOMMIT": "1"}
    with serving(folder / "run", store, **environment) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server, **options: Any) -> Iterator[Page]:
    """The page as somebody sees it who has not given a token yet. Nothing on it may fail, and it
    may ask nobody but its server."""
    context = browser.new_context(**{"locale": "en-US", **options})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(WIDE_MS)
    expect.set_options(timeout=WIDE_MS)
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on(
        "console",
        lambda said: (
            said.type == "error"
            and "Failed to load resource" not in said.text  # an error that the page shows itself
            and failures.append(said.text)
        ),
    )
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(re.sub(r"^(\w+://[^/]+).*", r"\1", request.url)))
    page.goto(server.url("/"))
    yield page
    context.close()
    assert failures == []
    assert asked == {server.url("")}


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Opens the page, signed in and live."""
    with ExitStack() as stack:

        def open_one(**options: Any) -> Page:
            page = stack.enter_context(opened(browser, server, **options))
            sign_in(page)
            expect(page.locator("#connection")).to_have_attribute("data-state", "live")
            expect(row(page, FOUR[0])).to_be_visible()
            return page

        yield open_one


def sign_in(page: Page, call: str = CALL, manage: str = MANAGE) -> None:
    page.fill("#token-call", call)
    page.fill("#token-manage", manage)
    page.keyboard.press("Enter")


def row(page: Page, name: str) -> Locator:
    return page.locator(f'tr[data-model="{name}"]')


def pane(page: Page, name: str) -> Locator:
    return page.locator(f'.answer[data-model="{name}"]')


def choose(page: Page, *names: str) -> None:
    """Select these models and no others."""
    while page.locator(".chip").count():
        page.locator(".chip").first.click()
    for name in names:
        row(page, name).locator("input").check()


def answer(page: Page, name: str) -> str:
    expect(pane(page, name)).to_have_attribute("data-state", "done")
    found = pane(page, name).locator(".text p").text_content()
    assert found is not None
    return found


def unload(server: Server, *names: str) -> None:
    for name in names:
        answer = server.delete(f"/models/{name}", headers=bearer(MANAGE))
        assert answer.status_code in (200, 404)


# What is served


def test_only_who_accepts_html_gets_the_page(server: Server) -> None:
    for accept in ("*/*", "application/json", ""):
        answer = server.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.json()["code"]) == (405, 405)
    assert server.get("/", headers=HTML, management=True).status_code == 405
    page = server.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    style = server.get("/console/style.css")
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    known = {**HTML, "If-None-Match": page.headers["etag"]}
    assert server.get("/", headers=known).status_code == 304
    for name in ("nothing.js", "..%2froutes.py", "%2e%2e/feed.py"):
        assert server.get(f"/console/{name}").status_code == 404


def test_what_it_shows_needs_a_token(server: Server) -> None:
    for given in ({}, bearer("wrong")):
        assert server.get("/console/events", headers=given).status_code == 401
    for token in (CALL, MANAGE):
        with server.get("/console/events", headers=bearer(token), stream=True) as answer:
            line = next(answer.iter_lines())
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert json.loads(line.removeprefix(b"data: "))["whole"] is True


# Models


def test_a_model_is_loaded_pinned_and_unloaded_and_a_reason_is_shown(
    server: Server, open_page: Callable[..., Page]
) -> None:
    unload(server, "봄")
    page = open_page()
    spring = row(page, "봄")
    spring.get_by_role("button", name="Load: 봄").click()
    expect(spring).to_have_attribute("data-state", "ready")
    expect(spring.locator(".state")).to_have_text("ready · hot")
    expect(page.locator("#journal")).to_contain_text("봄 loaded in")
    pin = spring.get_by_role("button", name="Pin: 봄")
    pin.click()
    expect(pin).to_have_attribute("aria-pressed", "true")
    described = server.get("/models/봄", headers=bearer(MANAGE))
    assert described.json()["settings"] == {"pinned": True}
    pin.click()
    expect(pin).to_have_attribute("aria-pressed", "false")
    spring.get_by_role("button", name="Unload: 봄").click()
    expect(spring).to_have_attribute("data-state", "stored")

    row(page, BROKEN).get_by_role("button", name=f"Load: {BROKEN}").click()
    expect(row(page, BROKEN)).to_have_attribute("data-state", "failed")
    reason = row(page, BROKEN).locator(".reason").inner_text()
    assert "kogpt2.params" in reason
    expect(page.locator("#trouble")).to_have_text(f"{BROKEN}: {reason}")
    expect(page.locator("#journal [data-event=failed]").first).to_contain_text(reason)


def test_what_others_do_is_seen_as_it_happens(
    server: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page()
    page.fill("#filter", "큰")
    expect(page.locator("#models tbody tr")).to_have_count(len(LARGE))
    page.fill("#filter", "")
    for name in [SLOW, *LARGE]:  # more than there is room for
        greedy(server, name, 2, **bearer(CALL))
        expect(row(page, name)).to_have_attribute("data-state", "ready")
    evicted = page.locator("#journal [data-event=evicted]")
    expect(evicted.first).to_contain_text("evicted, idle for")
    name = evicted.first.inner_text().split()[1]
    expect(row(page, name)).to_have_attribute("data-state", "stored")
    expect(row(page, LARGE[-1]).locator("[data-column=requests]")).not_to_have_text("0")
    expect(page.locator(".bar")).to_have_attribute("aria-label", re.compile("budget 72 MiB"))


# Answers


def test_four_models_answer_side_by_side(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, *FOUR)
    expect(row(page, SLOW).locator("input")).to_be_disabled()  # four and no more
    page.fill("#prompt", PROMPT)
    page.locator("summary").click()
    page.fill("#parameter-max_new_tokens", "12")
    page.press("#prompt", "Control+Enter")
    for name in FOUR:
        assert answer(page, name) == greedy(server, name, 12, PROMPT, **bearer(CALL))
        expect(pane(page, name).locator(".numbers")).to_contain_text("tokens/s")
    token = pane(page, FOUR[0]).locator(".token").first
    assert token.get_attribute("data-share") in "01234"
    token.click()
    detail = pane(page, FOUR[0]).locator(".detail")
    expect(detail).to_contain_text(json.dumps(token.inner_text(), ensure_ascii=False)[1:-1].strip())
    first = detail.inner_text()
    pane(page, FOUR[0]).locator(".text").press("ArrowRight")
    expect(detail).not_to_have_text(first)

    page.fill("#parameter-seed", "7")
    page.fill("#parameter-num_return_sequences", "2")
    page.click("#run")
    expect(page.locator("#stop")).to_be_disabled()
    expect(pane(page, FOUR[1]).locator(".text p")).to_have_count(2)


def test_a_classifiers_labels_have_bars(server: Server, open_page: Callable[..., Page]) -> None:
    body = {"inputs": PROMPT, "parameters": {"top_k": 8}}
    wanted = server.predict(quote(LABELED), body, **bearer(CALL)).json()  # loads it
    page = open_page()
    expect(row(page, LABELED)).to_contain_text("classifies texts")
    choose(page, LABELED)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    expect(pane(page, LABELED)).to_have_attribute("data-state", "done")
    labels = pane(page, LABELED).locator(".label")
    expect(labels).to_have_count(2)
    for label, entry in zip(labels.all(), wanted, strict=True):
        expect(label).to_contain_text(entry["label"])
        assert float(label.locator("meter").get_attribute("value") or 0) == entry["score"]
    expect(pane(page, LABELED).locator(".numbers")).to_contain_text("classified")
    unload(server, quote(LABELED))


def test_a_stopped_answer_frees_its_place(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, SLOW)
    page.locator("summary").click()
    page.fill("#parameter-max_new_tokens", "2500")
    page.fill("#parameter-num_return_sequences", "2")
    page.fill("#parameter-temperature", "0.01")
    page.press("#prompt", "Control+Enter")
    expect(pane(page, SLOW)).to_have_attribute("data-state", "running")
    expect(page.locator("#figures")).to_contain_text(re.compile("rows in the batch\\s*2"))
    page.keyboard.press("Escape")
    expect(pane(page, SLOW).locator(".numbers")).to_contain_text("stopped")
    eventually(lambda: running(server) == 0)
    expect(page.locator("#stop")).to_be_disabled()


def test_what_is_wrong_is_said_where_it_is(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(locale="ko-KR")
    choose(page, BROKEN, FOUR[0])
    page.click("#run")
    expect(pane(page, BROKEN)).to_have_attribute("data-state", "failed")
    expect(pane(page, BROKEN).locator(".reason")).to_contain_text("kogpt2.params")
    assert answer(page, FOUR[0])
    page.locator("summary").click()
    page.fill("#parameter-logit_bias", "[1]")
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("logit_bias 값이 JSON 객체가 아닙니다")
    page.fill("#parameter-logit_bias", '{"가": 1}')  # the server knows better
    page.click("#run")
    expect(pane(page, FOUR[0]).locator(".reason")).to_contain_text("parameters.logit_bias")
    page.fill("#parameter-logit_bias", "")
    page.check("#chat")
    page.click("#run")
    expect(pane(page, FOUR[0]).locator(".reason")).to_contain_text("template")


def test_a_call_is_copied_as_code_that_works(open_page: Callable[..., Page]) -> None:
    page, name = open_page(), "시/가을"
    choose(page, name)
    page.fill("#prompt", f"{PROMPT} '가' \"나\" $HOME <b>")
    page.locator("summary").click()
    page.fill("#parameter-max_new_tokens", "10")
    page.select_option("#parameter-form", "choice")
    page.fill("#parameter-form_text", "산에는\n꽃")
    page.click("#run")
    shown = answer(page, name)
    assert shown in ("산에는", "꽃")
    pane(page, name).get_by_role("button", name="Copy as").click()
    code = {}
    for tab in ("curl", "openai (Python)", "boto3 (Python)"):
        page.click(f'[data-name="{tab}"]')
        page.get_by_role("button", name="Copy", exact=True).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        code[tab] = page.evaluate("navigator.clipboard.readText()")
        assert CALL not in code[tab]
    page.keyboard.press("Escape")

    def run(*command: str) -> str:
        environment = {**os.environ, "INFERENCE_TOKEN": CALL, "PYTHONUTF8": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    events = re.findall(r"^data: (.*)$", run("bash", "-c", code["curl"]), re.MULTILINE)
    assert json.loads(events[-1])["generated_text"] == shown
    assert run(sys.executable, "-c", code["openai (Python)"]) == shown
    answered = ast.literal_eval(run(sys.executable, "-c", code["boto3 (Python)"]))
    assert answered["generated_text"] == shown


CODE_OF_FIELDS = """async ([model, chat]) => {
  const { snippets } = await import("/console/snippets.js");
  const values = { do_sample: true, stop: ["끝"], bad_words: ["나"], logit_bias: { 5: -1 } };
  const code = {};
  const copy = (name, value) => {
    const parameters = { max_new_tokens: 2, [name]: value };
    code[name] = snippets({ model, prompt: "나는", parameters, chat })["openai (Python)"];
  };
  for (const field of document.querySelectorAll('[id^="parameter-"]')) {
    const name = field.id.replace("parameter-", "");
    if (name === "form") for (const { value } of field.options) value && copy(value, ["산"]);
    else if (name !== "form_text") copy(name, values[name] ?? (field.type === "checkbox" || 1));
  }
  return code;
}"""


def test_the_openai_client_takes_every_field_as_it_is_copied(
    open_page: Callable[..., Page],
) -> None:
    page = open_page()
    resources = openai.resources
    for chat, method in (
        (False, resources.Completions.create),
        (True, resources.chat.Completions.create),
    ):
        codes = page.evaluate(CODE_OF_FIELDS, [FOUR[0], chat])
        assert {"typical_p", "min_new_tokens", "no_repeat_ngram_size", "bad_words"} < set(codes)
        known = set(inspect.signature(method).parameters)
        for name, code in codes.items():
            (call,) = (
                node
                for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".create")
            )
            assert {keyword.arg for keyword in call.keywords} <= known, name
            others = [ast.literal_eval(k.value) for k in call.keywords if k.arg == "extra_body"]
            assert not any(set(other) & known for other in others), name


# Its reader


def test_the_token_is_asked_for_and_kept_nowhere(browser: Browser, server: Server) -> None:
    unload(server, "여름")
    with opened(browser, server) as page:
        expect(page.locator("#token-dialog")).to_contain_text("stay in this page's memory")
        sign_in(page, "wrong", "")
        expect(page.locator("#token-dialog .reason")).to_have_text("This token was not accepted.")
        sign_in(page, CALL, "")
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        row(page, "여름").get_by_role("button", name="Load: 여름").click()
        expect(page.locator("#token-manage")).to_be_focused()  # that one is for calls only
        sign_in(page)
        expect(page.locator("#token-dialog")).to_have_count(0)
        expect(row(page, "여름")).to_have_attribute("data-state", "ready")
        kept = page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location])"
        )
        assert CALL not in kept
        assert MANAGE not in kept
        page.reload()
        expect(page.locator("#token-call")).to_have_value("")


CONTRASTS = """() => {
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ground = (element) => {
    const found = colour(getComputedStyle(element).backgroundColor);
    return found.length < 4 || found[3] > 0 ? found : ground(element.parentElement);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [a, b] = [colour(getComputedStyle(element).color), ground(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([texts.currentNode.data.trim(), ratio]);
  }
  return found;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea")]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)
"""


def test_every_text_can_be_read_in_light_and_dark_and_every_control_has_a_name(
    server: Server, open_page: Callable[..., Page]
) -> None:
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        row(page, BROKEN).get_by_role("button", name="Load").click()  # a reason in red
        expect(page.locator("#trouble")).not_to_be_empty()
        page.locator("summary").click()
        choose(page, FOUR[0])
        page.click("#run")
        assert answer(page, FOUR[0])
        page.locator(".answer .token").first.click()
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [(said, ratio) for said, ratio in contrasts if ratio < 4.5] == []
        assert page.evaluate(UNNAMED) == []


def test_it_speaks_korean_and_english_and_keeps_the_choice(
    server: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page(locale="ko-KR")
    expect(page.locator("#models-title")).to_have_text("모델")
    expect(page.locator("html")).to_have_attribute("lang", "ko")
    page.click("#language")
    expect(page.locator("#models-title")).to_have_text("Models")
    expect(row(page, FOUR[0]).locator("td").last).to_contain_text("Pin")
    page.click("#theme")
    page.reload()
    sign_in(page)
    expect(page.locator("html")).to_have_attribute("lang", "en")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_a_phone_shows_all_of_it_and_a_keyboard_reaches_all_of_it(
    server: Server, open_page: Callable[..., Page]
) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    choose(page, *FOUR)
    page.tap("#run")
    for name in FOUR:
        assert answer(page, name)
    for part in ("html", "#models"):
        assert page.locator(part).evaluate("e => e.scrollWidth - e.clientWidth") == 0, part
    expect(row(page, FOUR[0]).locator("[data-column=memory]")).to_be_visible()

    page = open_page()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to it
    expect(page.locator("#prompt")).to_be_focused()
    page.locator("h1").click()
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("여름")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(row(page, "여름").get_by_role("button").first).to_be_focused()


# All that the connection goes through from now on, however short.
STATES = """() => {
  const connection = document.getElementById("connection");
  window.states = [];
  new MutationObserver(() => window.states.push(connection.dataset.state))
    .observe(connection, { attributeFilter: ["data-state"] });
}"""


def test_it_comes_back_with_the_gateway(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.evaluate(STATES)
    (gateway,) = server.descendants("serving.gateway")
    gateway.kill()
    eventually(lambda: page.evaluate("states.includes('lost') && states.at(-1) === 'live'"))
    expect(row(page, FOUR[0])).to_be_visible()
