"""Models, adapters and options: those of one conversation, and those of all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import SMALL_SERVER, Visit, answer_of
from page_checks import LARGE, SMALL, fits, violations
from peft_folders import random_factors, write_adapter
from playwright.sync_api import Browser, Locator, Page, Route, expect
from server_process import server_process

# The query projection of the demo model's first layer with full attention.
MODULE = {"model.language_model.layers.3.self_attn.q_proj": (256, 128)}


@pytest.fixture(scope="module")
def several_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo model and two adapters of it."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("shout", "brief")):
        write_adapter(root / name, random_factors(MODULE, seed))
    named = f"shout={root / 'shout'},brief={root / 'brief'}"
    with server_process(*SMALL_SERVER, "--lora-modules", named) as server:
        yield server.url


@pytest.fixture
def several(browser: Browser, several_url: str) -> Iterator[Visit]:
    visit = Visit(browser, several_url)
    visit.open()
    yield visit
    visit.close()
    assert visit.errors == []


def choice(page: Page) -> Locator:
    return page.get_by_label("Model", exact=True)


def sent_by(visit: Visit, question: str) -> dict[str, Any]:
    """The body of the request that a question becomes."""
    with visit.page.expect_request("**/v1/chat/completions") as asked:
        visit.ask(question)
    body = asked.value.post_data_json
    assert isinstance(body, dict)
    return body


def test_an_adapter_is_chosen_for_a_conversation(several: Visit) -> None:
    page = several.page
    expect(choice(page).locator("option")).to_have_text(["demo", "shout", "brief"])
    choice(page).select_option("brief")
    assert sent_by(several, "Hello?")["model"] == "brief"
    assert answer_of(page, 0)
    page.reload()
    expect(choice(page)).to_have_value("brief")
    page.get_by_role("button", name="New conversation").click()
    expect(choice(page)).to_have_value("brief")  # the one that was in use
    choice(page).select_option("shout")
    assert sent_by(several, "Again?")["model"] == "shout"
    page.locator(".sidebar .open", has_text="Hello?").click()
    expect(choice(page)).to_have_value("brief")
    assert sent_by(several, "Still?")["model"] == "brief"


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_the_choice_is_reachable_on_every_screen(several: Visit, size: Any) -> None:
    page = several.page
    page.set_viewport_size(size)
    expect(choice(page)).to_be_in_viewport(ratio=1)
    assert fits(page)
    assert violations(page) == []


def test_a_model_that_is_gone_gives_way_to_the_first(several: Visit) -> None:
    page = several.page

    def with_another(route: Route) -> None:
        answer = route.fetch()
        told = answer.json()
        told["data"].append(told["data"][0] | {"id": "unloaded"})
        route.fulfill(response=answer, json=told)

    page.route("**/v1/models", with_another)
    page.reload()
    choice(page).select_option("unloaded")
    page.unroute("**/v1/models")
    page.reload()
    expect(choice(page)).to_have_value("demo")
    assert "error" not in sent_by(several, "Hello?")
    assert answer_of(page, 0)


def test_one_model_is_no_choice(visit: Visit) -> None:
    expect(visit.page.locator(".model")).to_have_text("demo")
    expect(choice(visit.page)).to_have_count(0)


def test_options_begin_with_the_system_prompt_and_end_in_sight(visit: Visit) -> None:
    page = visit.page
    for size in (LARGE, SMALL):
        page.set_viewport_size(size)
        page.get_by_role("button", name="Options").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("System prompt")).to_be_focused()
        expect(dialog.get_by_role("button", name="Use these options")).to_be_in_viewport(ratio=1)
        assert fits(page)
        assert violations(page) == []
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)


def test_a_dialog_begins_where_one_types(visit: Visit) -> None:
    page = visit.page
    visit.ask("One?")
    page.locator(".sidebar .open").hover()
    page.get_by_role("button", name="Rename One?").click()
    expect(page.get_by_role("dialog").get_by_label("Name")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_role("dialog").get_by_label("Key")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Delete One?").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()


def placeholders(dialog: Locator) -> list[str]:
    names = ("Temperature", "Top p", "Top k", "Longest answer", "Seed")
    return [dialog.get_by_label(name).get_attribute("placeholder") or "" for name in names]


def test_placeholders_say_what_the_default_is(browser: Browser, tmp_path: Path) -> None:
    sampled = '{"do_sample": true, "temperature": 0.7, "top_k": 20, "max_new_tokens": 500}'
    (tmp_path / "generation_config.json").write_text(sampled)
    arguments = (*SMALL_SERVER, "--generation-config", str(tmp_path))
    with server_process(*arguments) as server:
        visit = Visit(browser, server.url)
        visit.open()
        visit.page.get_by_role("button", name="Options").click()
        told = placeholders(visit.page.get_by_role("dialog"))
        assert told == ["0.7", "1", "20", "500", "random"]
        visit.close()


def test_placeholders_of_a_greedy_model(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Options").click()
    told = placeholders(visit.page.get_by_role("dialog"))
    assert told == ["0", "1", "all", "no limit", "random"]


def set_defaults(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Defaults").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading", name="Defaults of all conversations")).to_be_visible()
    for label, value in values.items():
        dialog.get_by_label(label.replace("_", " ")).fill(value)
    dialog.get_by_role("button", name="Use these options").click()
    expect(dialog).to_have_count(0)


def test_defaults_hold_for_all_conversations_and_each_may_differ(visit: Visit) -> None:
    page = visit.page
    visit.ask("One?")
    set_defaults(page, System_prompt="Be brief.", Temperature="0.5", Longest_answer="3")
    body = sent_by(visit, "And now?")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.5, 3)
    page.reload()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Options").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Temperature")).to_have_attribute("placeholder", "0.5")
    expect(dialog.get_by_label("System prompt")).to_have_attribute("placeholder", "Be brief.")
    dialog.get_by_label("Temperature").fill("0")
    dialog.get_by_label("System prompt").fill("Be long.")
    dialog.get_by_role("button", name="Use these options").click()
    body = sent_by(visit, "Two?")
    assert body["messages"][0]["content"] == "Be long."
    assert (body["temperature"], body["max_tokens"]) == (0, 3)
    page.locator(".sidebar .open", has_text="One?").click()
    assert sent_by(visit, "Still?")["temperature"] == 0.5


def test_a_conversation_may_turn_a_text_of_the_defaults_off(visit: Visit) -> None:
    """A blank overrides a default as any other text does."""
    page = visit.page
    set_defaults(page, System_prompt="Be brief.")
    page.get_by_role("button", name="Options").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("a space alone means none")
    dialog.get_by_label("System prompt").fill(" ")
    dialog.get_by_role("button", name="Use these options").click()
    assert sent_by(visit, "Hello?")["messages"][0]["role"] == "user"


def test_what_is_stored_as_defaults_may_be_anything(visit: Visit) -> None:
    """Another version of the page may have written it."""
    page = visit.page
    for stored in ("{", "null", "[]", '{"temperature": 5, "tools": {}}'):
        page.evaluate("(text) => localStorage.setItem('vlm-serve-defaults', text)", stored)
        page.reload()
        body = sent_by(visit, "Hello?")
        assert "temperature" not in body and "tools" not in body
