"""What a model says is not trusted: it is shown, and neither run, loaded nor followed."""

from __future__ import annotations

import pytest
from browser import Visit
from page_checks import saying
from playwright.sync_api import expect

from vlm_serve.server.http.static_page import CONTENT_SECURITY_POLICY

STRANGER = "http://192.0.2.1"  # an address that is kept for documents

HOSTILE = {
    "script": "<script>document.title = 'owned'</script>",
    "handler": "<img src=x onerror=\"document.title = 'owned'\">",
    "picture": f"![a cat]({STRANGER}/cat.png)",
    "reference": f"![cat][c]\n\n[c]: {STRANGER}/cat.png",
    "html_picture": f"<img src='{STRANGER}/cat.png'>",
    "svg": "<svg onload=\"document.title = 'owned'\"><a xlink:href='javascript:1'>x</a></svg>",
    "javascript": "[click](javascript:document.title='owned')",
    "hidden_javascript": "[click](java&#x0A;script:document.title='owned')",
    "data": "[click](data:text/html,<script>document.title='owned'</script>)",
    "own_route": "[click](/v1/cache/flush) [click](//192.0.2.1/)",
    "style": f"<style>b {{ background: url({STRANGER}/x) }}</style><b style='top: 0'>x</b>",
    "form": f"<form action='{STRANGER}'><button>Send</button></form><input autofocus>",
    "frame": f"<iframe src='{STRANGER}'></iframe><object data='{STRANGER}'></object>",
    "attribute": '![x" onerror="document.title=`owned`](x)',
    "title": "[x](https://example.org \"y' onclick='document.title=1\")",
    "formula": "$\\href{javascript:document.title='owned'}{x}$ $\\htmlStyle{color: red}{x}$",
    "picture formula": f"$$\\includegraphics{{{STRANGER}/cat.png}}$$",
    "macros": "$\\def\\a{\\a\\a}\\a$ $" + "{" * 1900 + "}" * 1900 + "$",
    "language": "```python' onclick=document.title=1 class=copy\nx\n```",
    "code": "```html\n</code></pre><script>document.title='owned'</script>\n```",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_is_shown_and_nothing_of_it_happens(visit: Visit, text: str) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=text))
    visit.ask("Be hostile")
    said = page.locator(".markdown")
    expect(said).not_to_be_empty()
    forbidden = (
        "script, img, iframe, object, svg:not(.copy svg, .katex svg), style, form, input, "
        "button:not(.copy), [style]:not(.katex *), [onclick]"
    )
    expect(said.locator(forbidden)).to_have_count(0)
    for link in said.locator("a").all():
        address = link.get_attribute("href")
        assert address is None or address.startswith(("https://", "http://"))
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        if address is None:
            link.click()
    assert "owned" not in page.title()
    expect(page.locator("nav[aria-label=Views] a[aria-current]")).to_have_text("Chat")


def test_a_picture_of_an_answer_is_a_link(visit: Visit) -> None:
    visit.page.route("**/v1/chat/completions", saying(content=HOSTILE["picture"]))
    visit.ask("Show me a cat")
    link = visit.page.locator(".markdown a")
    expect(link).to_have_text("a cat (image, not loaded)")
    expect(link).to_have_attribute("href", f"{STRANGER}/cat.png")


def test_html_is_shown_as_the_text_that_it_is(visit: Visit) -> None:
    visit.page.route("**/v1/chat/completions", saying(content=f"Look: {HOSTILE['script']}"))
    visit.ask("Be hostile")
    expect(visit.page.locator(".markdown")).to_have_text(f"Look: {HOSTILE['script']}")


def test_reasoning_and_calls_are_text_and_folded(visit: Visit) -> None:
    page = visit.page
    function = {"name": "<b>f</b>", "arguments": '{"a": "<script>document.title=1</script>"}'}
    call = {"index": 0, "id": "1", "type": "function", "function": function}
    answer = saying(reasoning=HOSTILE["handler"], content="Well.", tool_calls=[call])
    page.route("**/v1/chat/completions", answer)
    visit.ask("Think")
    folded = page.locator(".folded")
    expect(folded.locator("summary")).to_have_text(["Reasoning", "Call of <b>f</b>"])
    expect(folded.locator("pre").first).to_be_hidden()
    folded.locator("summary").first.click()
    expect(folded.locator("pre").first).to_have_text(HOSTILE["handler"])
    expect(folded.locator("b, script, img")).to_have_count(0)


def test_names_of_files_and_questions_are_text(visit: Visit) -> None:
    page = visit.page
    content = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
    name = "<img src=x onerror=alert(1)>.gif"
    visit.choose({"name": name, "mimeType": "image/gif", "buffer": content})
    page.route("**/v1/chat/completions", saying(content="Well."))
    visit.ask("<script>document.title = 'owned'</script>")
    expect(page.locator(".question img")).to_have_attribute("alt", name)
    expect(page.locator(".conversation-bar h1")).to_have_text(
        "<script>document.title = 'owned'</script>"
    )
    page.evaluate("() => { location.hash = '#reuse' }")
    assert "owned" not in page.title()


def test_the_page_may_only_do_what_it_needs(visit: Visit) -> None:
    """The policy is in force: text does not become a script, by no way that there is."""
    assert "require-trusted-types-for 'script'" in CONTENT_SECURITY_POLICY
    refused = visit.page.evaluate("""() => {
        const attempts = [
            () => { document.createElement("div").innerHTML = "<b>x</b>"; },
            () => { document.createElement("script").src = "/main.js"; },
            () => new Worker("/main.js"),
            () => trustedTypes.createPolicy("mine", {createHTML: (text) => text}),
            () => trustedTypes.createPolicy("page", {createScriptURL: (url) => url}),
        ];
        return attempts.map((attempt) => {
            try { attempt(); return false; } catch (error) { return error instanceof TypeError; }
        });
    }""")
    assert refused == [True] * 5
    assert len(visit.errors) == 5  # the browser says each
    visit.errors.clear()


LONG = {
    "nested lists": "".join("  " * (n % 20) + "- x\n" for n in range(80_000)),
    "nested quotes": ">" * 160_000,
    "emphasis": "_a_ " * 100_000,
    "paragraphs": "Some *words* of it.\n\n" * 100_000,
    "a line": "a" * 2_000_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_answer_is_shown_whole_and_leaves_the_page_alive(visit: Visit, text: str) -> None:
    """Only a part of bounded length, paragraphs and depth is parsed."""
    page = visit.page
    page.route("**/v1/chat/completions", saying(content=f"*First.*\n\n{text} The end."))
    visit.ask("Be long")
    said = page.locator(".markdown")
    expect(said.locator(".plain").last).to_contain_text("The end.", timeout=60_000)
    expect(said.locator("em").first).to_have_text("First.")
    assert page.evaluate("document.querySelectorAll('.markdown *').length") < 20_000
    plain = page.evaluate(
        "[...document.querySelectorAll('.markdown .plain')].map(e => e.textContent).join('')"
    )
    assert text.endswith(plain.removesuffix(" The end."))
    assert len(plain) > len(text) - 40_000
    depth = "[...document.querySelectorAll('.markdown li, .markdown blockquote')].map(e => {"
    depth += "let n = 0; while (e = e.parentElement.closest('li, blockquote')) n++; return n })"
    assert max(page.evaluate(depth), default=0) <= 40
