"""Formulas and code in answers."""

from __future__ import annotations

import pytest
from browser import Visit
from page_checks import saying
from playwright.sync_api import expect


def say(visit: Visit, text: str) -> None:
    visit.page.route("**/v1/chat/completions", saying(content=text))
    visit.ask("Say it")


def test_formulas_are_set_and_copied_as_tex(visit: Visit) -> None:
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=visit.url)
    say(visit, "So $a^2$, \\(b\\), and\n\n$$\n\\frac{1}{2} + \\fbox{c}\n$$\n\nThe end.")
    expect(page.locator(".markdown .katex")).to_have_count(3)
    expect(page.locator(".markdown .katex-display")).to_have_count(1)
    page.evaluate("async () => { await document.fonts.ready; }")
    assert page.evaluate("() => document.fonts.check('16px KaTeX_Math')")
    page.get_by_role("button", name="Copy this formula as TeX").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == "\\frac{1}{2} + \\fbox{c}"


@pytest.mark.parametrize(
    "text",
    ["It costs $5 or $6.", "From $HOME to $PATH", "`$x$`", "a $ b $ c", "\\$x\\$"],
)
def test_a_dollar_sign_is_a_dollar_sign(visit: Visit, text: str) -> None:
    say(visit, text)
    expect(visit.page.locator(".markdown")).to_have_text(text.replace("`", "").replace("\\", ""))
    expect(visit.page.locator(".markdown .math, .markdown .katex")).to_have_count(0)


def test_what_is_no_formula_stays_as_it_is(visit: Visit) -> None:
    say(visit, "A $\\frac{1}$ and a $x^2$.")
    expect(visit.page.locator(".markdown .katex")).to_have_count(1)
    expect(visit.page.locator(".markdown code.math")).to_have_text("\\frac{1}")


def test_code_is_coloured_and_copied(visit: Visit) -> None:
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=visit.url)
    code = 'def f(x):\n    return "<b>"  # so'
    say(visit, f"```py\n{code}\n```\n\n```unheard-of\nx = 1\n```\n\n```\nplain\n```")
    block = page.locator(".code-block")
    expect(block).to_have_count(3)
    expect(block.first.locator(".code-keyword")).to_have_text(["def", "return"])
    expect(block.first.locator(".code-string")).to_have_text('"<b>"')
    expect(block.first.locator(".code-comment")).to_have_text("# so")
    expect(block.nth(1).locator("code span")).to_have_count(0)
    expect(block.nth(1).locator(".code-bar")).to_have_text("unheard-of")
    block.first.get_by_role("button", name="Copy this code").click()
    expect(block.first.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == code + "\n"


def test_every_language_colours_something(visit: Visit) -> None:
    """Each grammar is loaded and parses."""
    told = visit.page.evaluate("""async () => {
        const {highlighted} = await import("/chat/highlighting.js");
        const code = {diff: "+a", markdown: "# a", css: "a { color: red }", json: "[1]",
            latex: "\\\\frac{a}", makefile: "a: b\\n\\tc", xml: "<a b='c'></a>", yaml: "a: 1",
            ini: "a = 1", dockerfile: "FROM a", bash: "echo 'a'"};
        const names = ["bash", "c", "cpp", "csharp", "css", "diff", "dockerfile", "go", "ini",
            "java", "javascript", "json", "kotlin", "latex", "lua", "makefile", "markdown", "php",
            "powershell", "python", "r", "ruby", "rust", "sql", "swift", "typescript", "xml",
            "yaml"];
        const missing = [];
        for (const name of names) {
            const text = code[name] ?? "if 1 'a' select return";
            let nodes = null;
            for (let tries = 0; nodes === null && tries < 500; tries += 1) {
                nodes = highlighted(text, name);
                await new Promise((resolve) => setTimeout(resolve, 10));
            }
            if (!nodes?.some((node) => node.nodeName === "SPAN")) missing.push(name);
        }
        return missing;
    }""")
    assert told == []


def test_an_answer_without_them_loads_neither(visit: Visit) -> None:
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    say(visit, "Just *words*.")
    expect(visit.page.locator(".markdown em")).to_have_text("words")
    assert not [url for url in asked if "vendor" in url]


def test_the_end_of_an_answer_stays_in_sight_until_the_reader_goes_up(visit: Visit) -> None:
    """Also while formulas and pictures arrive, which make it longer."""
    page = visit.page
    page.set_viewport_size({"width": 380, "height": 500})
    visit.upload("shapes.png")
    say(visit, "Look.\n\n" + "$$\\sum_{i=1}^n \\frac{1}{i^2}$$\n\n" * 8)
    expect(page.locator(".katex-display")).to_have_count(8)
    left = "(area) => area.scrollHeight - area.scrollTop - area.clientHeight"
    thread = page.locator(".thread")
    for _ in range(100):
        if thread.evaluate(left) < 2:
            break
        page.wait_for_timeout(50)
    assert thread.evaluate(left) < 2
    thread.evaluate("(area) => { area.scrollTop = 0; }")
    page.wait_for_timeout(200)
    page.locator(".turns").evaluate("(turns) => { turns.append('x'.repeat(500)); }")
    page.wait_for_timeout(200)
    assert thread.evaluate("(area) => area.scrollTop") == 0
