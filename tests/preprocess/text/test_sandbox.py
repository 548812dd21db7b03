"""Templates that would take the machine's memory, or all of its time, in one expression."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest
from published_templates import NAMES, source_of

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.preprocess.text import sandbox
from vlm_serve.preprocess.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello, world!"}]
BIG = "{% set x = 'x' * 9999999 %}"
WIDE = "{% set r = range(99999) %}"
DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(70) %}{% set ns.x = VALUE %}{% endfor %}"
)
HOSTILE = {
    "text times": "{{ 'x' * 10**10 }}",
    "times text": "{{ 10**10 * 'x' }}",
    "list times": "{% set x = [1] * 10**10 %}",
    "tuple times": "{% set x = (1, 2) * 10**10 %}",
    "width of %": "{{ '%999999999d' % 1 }}",
    "precision of %": "{{ '%.999999999f' % 1.5 }}",
    "star of %": "{{ '%*d' % (10**9, 1) }}",
    "many %": BIG + "{{ ('%s' * 99999) % ((x,) * 99999) }}",
    "named %": BIG + "{{ ('%(a)s' * 99999) % {'a': x} }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power in a test": "{% if 9 ** (9 ** 9) > 1 %}x{% endif %}",
    "squares": DOUBLED.replace("'ab'", "3").replace("VALUE", "ns.x * ns.x"),
    "~ doubled": DOUBLED.replace("VALUE", "ns.x ~ ns.x"),
    "+ doubled": DOUBLED.replace("VALUE", "ns.x + ns.x"),
    "list doubled": DOUBLED.replace("'ab'", "[1, 2]").replace("VALUE", "ns.x + ns.x"),
    "join doubled": DOUBLED.replace("VALUE", "[ns.x, ns.x]|join"),
    "join as a method doubled": DOUBLED.replace("VALUE", "ns.x.join(['', '', ''])"),
    "replace doubled": DOUBLED.replace("VALUE", "ns.x|replace('a', 'aaba')"),
    "format doubled": DOUBLED.replace("VALUE", "'{0}{0}'.format(ns.x)"),
    "% doubled": DOUBLED.replace("VALUE", "'%s%s'|format(ns.x, ns.x)"),
    "nested doubled": DOUBLED.replace("VALUE", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested doubled, as JSON": DOUBLED.replace("VALUE", "{'a': ns.x, 'b': ns.x}")
    + "{{ ns.x|tojson }}",
    "nested doubled, as text": DOUBLED.replace("VALUE", "[ns.x, ns.x]")
    + "{% set y = ns.x|string %}",
    "nested doubled, joined": DOUBLED.replace("VALUE", "[ns.x, ns.x]") + "{% set y = '' ~ ns.x %}",
    "nested doubled, trimmed": DOUBLED.replace("VALUE", "[ns.x, ns.x]") + "{% set y = ns.x|trim %}",
    "namespace written": DOUBLED.replace("VALUE", "[ns.x, ns.x]") + "{{ ns }}",
    "block doubled": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 70,
    "macro doubled": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'ab' %}"
    + "{% set x = m(x) %}" * 70,
    "straight doubled": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 70,
    "center": "{{ 'x'|center(10**10) }}",
    "center as a method": "{{ 'x'.center(10**10) }}",
    "center by attr": "{{ ('x'|attr('center'))(10**10) }}",
    "center by an item": "{{ 'x'['center'](10**10) }}",
    "center mapped": "{{ ['x']|map('center', 10**10)|list }}",
    "center in a block": "{% filter center(10**10) %}x{% endfilter %}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "rjust": "{{ 'x'.rjust(10**10, 'y') }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(2**31 - 1) }}",
    "to bytes": "{{ (1).to_bytes(10**10, 'little') }}",
    "indent": "{{ ('a\n' * 9999)|indent(10**9) }}",
    "indent by a text": BIG + "{{ ('a\n' * 9999)|indent(x) }}",
    "join": BIG + "{{ ([x] * 9999)|join(x) }}",
    "join mapped": BIG + "{{ ([x] * 9999)|map('string')|join }}",
    "join as a method": BIG + "{{ x.join(['a'] * 9999) }}",
    "replace": BIG + "{{ x|replace('x', x) }}",
    "replace nothing": BIG + "{{ x|replace('', x) }}",
    "replace as a method": BIG + "{{ x.replace('x', x) }}",
    "format": "{{ '{:>999999999d}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format many": BIG + "{{ ('{0}' * 99999).format(x) }}",
    "format map": BIG + "{{ ('{a}' * 99999).format_map({'a': x}) }}",
    "translate": BIG + "{{ x.translate({120: x}) }}",
    "tojson indent": "{{ ([1] * 99999)|tojson(indent=10**6) }}",
    "tojson separators": BIG + "{{ ([1] * 99999)|tojson(separators=(x, x)) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10, 'x')|list }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "wordwrap": BIG + "{{ x|wordwrap(1, wrapstring=x) }}",
    "lists of one text": BIG + "{{ [x] * 9999 }}",
    "slices": BIG + WIDE + "{% set ns = namespace(l=[]) %}"
    "{% for i in r %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "loops in loops": WIDE + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "loops that write nothing": WIDE
    + "{% for a in r %}{% for b in r %}{{ '' }}{% endfor %}{% endfor %}",
    "a loop in a block": WIDE
    + "{% set x %}{% for a in r %}{% for b in r %}a{% endfor %}{% endfor %}{% endset %}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a long refusal": BIG + "{{ raise_exception(x) }}",
}
ENDLESS = (
    "~ doubled",
    "loops in loops",
    "power",
    "text times",
)
NOT_COMPILED = {
    "nested": "{% if 1 %}" * 5000 + "x" + "{% endif %}" * 5000,
    "nested loops": "{% for a in [1] %}" * 40 + "x" + "{% endfor %}" * 40,
    "nested brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested lists": "{{ " + "[" * 900 + "1" + "]" * 900 + " }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "long": "x" * 30_000_000,
}


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tenth of the usual limits: what is refused by them alone is refused sooner."""
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 26)
    monkeypatch.setattr(sandbox, "_AT_ONCE", 1 << 24)
    yield


@pytest.mark.parametrize("name", HOSTILE)
def test_no_operation_takes_the_machine(name: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(HOSTILE[name], max_seconds=0.5).render(MESSAGES)
    assert len(caught.value.message) < 1100 and "\n" not in caught.value.message
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400 << 10, f"{grown >> 10} MiB in {time.monotonic() - began:.1f} s"


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_beyond_the_limits_is_probed_once(name: str) -> None:
    """It would be so for every probe, and for every message."""
    template = ChatTemplate(HOSTILE[name], max_seconds=0.2)
    with pytest.raises(CheckpointError, match="^the chat template (takes longer|refuses)"):
        _ = template.traits


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_python_cannot_compile_is_a_sentence(name: str) -> None:
    with pytest.raises(CheckpointError, match="^the chat template does not compile: "):
        ChatTemplate(NOT_COMPILED[name])


SOUND = {
    "{{ '%s and %05.1f' % ('a', 2.5) }}": "a and 002.5",
    "{{ '%s' % 1700000000 }}{{ '%d' % 10**12 }}": "17000000001000000000000",
    "{{ '{:>5}|{}'.format(1, 1700000000000) }}": "    1|1700000000000",
    "{{ 'ab'|center(6) }}|{{ 'ab'.ljust(4) }}|": "  ab  |ab  |",
    "{{ [1, 'b', none]|join(', ') }}": "1, b, None",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ [1] }}": "a1None[1]",
    "{{ [1, 2, 3, 4][1:] }}{{ 'hello'[:-1] }}{{ 'hello'[::-1] }}": "[2, 3, 4]hellolleh",
    "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }},{% endfor %}":
        "1/2:1,2/2:3,",
    "{% for x in [1, 2] %}{{ x }}{{ '' if loop.last else ';' }}{% else %}none{% endfor %}": "1;2",
    "{% for x in nothing %}x{% else %}none{% endfor %}": "none",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}": "a1",
    "{% for x in [[1, [2]], [3]] recursive %}"
    "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}": "(1(2))(3)",
    "{{ {'a': [1, 'é']}|tojson(indent=2) }}": '{\n  "a": [\n    1,\n    "é"\n  ]\n}',
    "{{ 2 ** 10 }} {{ 7 % 4 }} {{ 3 * 4 }} {{ [0] * 3 }} {{ 'ab' * 2 }} {{ -1 * 'a' }}":
        "1024 3 12 [0, 0, 0] abab ",
    "{{ 'a,b'.split(',')|map('upper')|join('+') }}": "A+B",
    "{{ 'abc'|replace('b', 'xx') }}{{ 'abcb'.replace('b', 'y', 1) }}": "axxcaycb",
    "{{ 1.25|round(1) }}{{ 'x\ny'|indent(2) }}": "1.2x\n  y",
    "{{ [1, 2, 3]|batch(2, 0)|list }}": "[[1, 2], [3, 0]]",
}  # fmt: skip


@pytest.mark.parametrize("source", SOUND)
def test_what_templates_do_is_as_it_was(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == SOUND[source]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_conversation_is_within_the_limits(name: str) -> None:
    messages = [
        {"role": role, "content": f"<think>\nwhy\n</think>\n{number} " + "words " * 700}
        for number in range(40)
        for role in ("user", "assistant")
    ]
    template = ChatTemplate(source_of(name))
    forms = template.traits.content["user"]
    text = template.render([m | {"content": forms.fit(m["content"])} for m in messages])
    assert len(text) > 100_000
