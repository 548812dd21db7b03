"""The documents that show the way name files and headings that exist."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import step_map

from vlm_serve.cli import build_parser
from vlm_serve.server.workers import worker_table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SUFFIXES = {".py", ".md", ".h", ".cpp"}
WANTED = {
    "README.md": {
        "docs/architecture.md#where-something-new-goes",
        "docs/architecture.md#what-a-hit-guarantees",
        "docs/architecture.md#questions-newcomers-ask",
        "docs/performance.md",
        "docs/step.md",
        "docs/threads.md",
    },
    "docs/architecture.md": {
        "step.md",
        "threads.md",
        "adding-a-model.md",
        "http-api.md",
        "performance.md#figures",
        "performance.md#how-to-read-a-low-hit-rate",
    },
}
"""What somebody who looks for it finds: a document -> links in it."""
NEW = {
    "cache tier",
    "drafter",
    "endpoint",
    "kernel",
    "metric",
    "model",
    "option",
    "reason",
    "router",
    "sampling option",
    "weight format",
}
"""What one may want to add."""
CORE = {
    "adapter",
    "answer",
    "block",
    "cut point",
    "draft",
    "hook",
    "join",
    "lease",
    "match",
    "node",
    "plan",
    "request",
    "row",
    "sequence",
    "slice",
    "snapshot",
    "step",
    "tier",
}
"""The nouns of the core, each of which a file owns."""
PRODUCT = ("cache", "kernels", "preprocess", "vlm_serve")


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def sources() -> list[Path]:
    """Files with text of our own."""
    folders = (
        "benchmarks",
        "cache",
        "docs",
        "examples",
        "kernels",
        "preprocess",
        "tests",
        "train_demo",
    )
    found = [*ROOT.glob("*.md")]
    for folder in (*folders, "vlm_serve"):  # whose links are not followed
        found += [each for each in (ROOT / folder).rglob("*") if each.suffix in SUFFIXES]
    return found


def documents() -> list[Path]:
    """Those that a reader opens."""
    return [*ROOT.glob("*.md"), *DOCS.glob("*.md")]


def linked(path: Path) -> set[Path]:
    """The documents that one leads to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8"))
    return {(path.parent / target).resolve() for target in targets}


def test_references_to_a_heading_lead_to_one() -> None:
    seen = 0
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"docs/([\w-]+\.md)#([\w-]+)", text):
            seen += 1
            assert anchor in anchors(DOCS / name), f"{path.relative_to(ROOT)}: {name}#{anchor}"
    assert seen > 20


def test_links_to_a_heading_lead_to_one() -> None:
    seen = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", text):
            seen += 1
            target = path.parent / name if name else path
            assert anchor in anchors(target), f"{path.relative_to(ROOT)}: {name}#{anchor}"
    assert seen > 25


def test_every_document_is_two_links_from_the_readme_at_most() -> None:
    first = linked(ROOT / "README.md")
    found = first | {page for path in first for page in linked(path)}
    assert set(documents()) - found <= {ROOT / "README.md"}


def test_what_one_looks_for_is_linked() -> None:
    for name, links in WANTED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in links:
            assert f"]({link})" in text, f"{name} does not link {link}"
    assert {"what-a-hit-guarantees", "replicas"} <= anchors(DOCS / "architecture.md")
    assert "how-to-read-a-low-hit-rate" in anchors(DOCS / "performance.md")


def test_the_map_says_where_everything_new_goes() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Where something new goes")[1]
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.+?) \|", table, re.MULTILINE))
    assert rows.keys() >= NEW
    for name in NEW - {"option"}:
        assert re.search(r"`[\w*<>/.-]+/[\w*<>/.-]*`", rows[name]), f"no place for a new {name}"


def test_scripts_and_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        said = re.findall(r"`make ([a-z][\w-]+)", text)
        for name in said + re.findall(r"^make ([a-z][\w-]+)", fenced, re.MULTILINE):
            assert name in targets, f"{path.name}: make {name}"
        for name in re.findall(r"(?:benchmarks|examples|tests|train_demo)/[\w/]+\.py", text):
            scripts += 1
            assert (ROOT / name).is_file(), f"{path.name}: {name}"
    assert scripts > 20


def fenced_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a document's code, continued ones joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
    yield from "\n".join(blocks).replace("\\\n", " ").splitlines()


def commands(line: str, program: str) -> Iterator[list[str]]:
    """Yield the words behind a program in a shell line, if it has any."""
    with contextlib.suppress(ValueError):  # A line of another language.
        words = shlex.split(line.split("|")[0], comments=True)
        for number, word in enumerate(words):
            before = words[:number]
            if word in (program, f".venv/bin/{program}") and all("=" in each for each in before):
                yield [each for each in words[number + 1 :] if each != "&"]


def test_commands_in_the_documents_are_accepted() -> None:
    seen = 0
    for path in documents():
        for line in fenced_lines(path):
            for words in commands(line, "vlm-serve"):
                seen += 1
                build_parser().parse_args(words)
            for words in commands(line, "docker"):
                images = [n for n, word in enumerate(words) if word.startswith("vlm-serve")]
                if words[0] == "run" and words[images[-1] :][1:]:
                    seen += 1
                    build_parser().parse_args(words[words.index("vlm-serve") + 1 :])
    assert seen > 45


def test_commands_in_sentences_are_accepted() -> None:
    seen = 0
    for path in documents():
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", text):
            command = re.sub(r"^(\w+=\S+ )*", "", " ".join(code.split()))
            if not command.startswith("vlm-serve ") or command.startswith("vlm-serve needs "):
                continue  # The latter is what `make` says.
            command = command.removeprefix("vlm-serve ")
            words = shlex.split(" ".join(command.split()).replace("...", ""))
            flags = [word.split("=")[0] for word in words if word.startswith("--")]
            known = flags_of(words[0])
            seen += 1
            assert set(flags) <= known, f"{path.name}: vlm-serve {command}"
    assert seen > 20


def flags_of(command: str) -> set[str]:
    """Return the flags of a command and of its own commands. Raises KeyError: there is none."""
    parser: argparse.ArgumentParser = build_parser()
    if command.startswith("--"):
        return {*parser._option_string_actions}
    (commands_action,) = (
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    waiting, found = [commands_action.choices[command]], set[str]()
    while waiting:
        parser = waiting.pop()
        found |= parser._option_string_actions.keys()
        for each in parser._actions:
            if isinstance(each, argparse._SubParsersAction):
                waiting += each.choices.values()
    return found


def test_scripts_in_the_documents_know_their_flags() -> None:
    seen = 0
    for path in documents():
        for line in fenced_lines(path):
            for words in commands(line, "python"):
                script = ROOT / words[0]
                if not words[0].endswith(".py") or not script.is_file():
                    continue
                near = [
                    script,
                    *script.parent.glob("*.py"),
                    *(script.parent / "common").glob("*.py"),
                ]
                known = "".join(each.read_text("utf-8") for each in near)
                for flag in (word.split("=")[0] for word in words if word.startswith("--")):
                    seen += 1
                    names = (f'"{flag}"', flag.removeprefix("--").replace("-", "_"))
                    assert any(each in known for each in names), f"{path.name}: {line}"
    assert seen > 5


def test_no_document_is_cited_that_is_not_here() -> None:
    cited = re.compile(r"\(design, sections? \d")
    found = [path for path in sources() if cited.search(path.read_text(encoding="utf-8"))]
    assert not found


def named_file(name: str) -> list[Path]:
    """Return the files and folders that a document means by a path, which may have stars."""
    folders = (ROOT, ROOT / "vlm_serve", ROOT / "vlm_serve" / "server", ROOT / "kernels")
    found = {path.resolve() for folder in folders for path in folder.glob(name.rstrip("/"))}
    return sorted(found)


def test_files_that_the_maps_name_exist() -> None:
    for page, least in (("architecture.md", 100), ("threads.md", 30), ("step.md", 100)):
        text = (DOCS / page).read_text(encoding="utf-8")
        names = [name for name in re.findall(r"`([\w./*-]+)(?::\w+)?`", text) if "/" in name[1:]]
        assert len(names) > least
        for name in names:
            assert name[0] == "/" or named_file(name), f"{page}: {name}"


def definitions(path: Path) -> set[str]:
    """Return the names that a module defines: `function`, `Class` and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = ast.FunctionDef | ast.AsyncFunctionDef
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, inner)}
    return found


def test_questions_of_newcomers_need_a_document_and_three_files_at_most() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Questions newcomers ask")[1]
    rows = re.findall(r"^\| ([^|]+\?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    assert len(rows) == 10
    for question, document, code in rows:
        assert re.search(r"\]\((?:[\w-]+\.md)?(?:#[\w-]+)?\)", document), question
        places = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", code)
        assert 1 <= len({name for name, _ in places}) <= 3, question
        for name, what in places:
            (path,) = named_file(name)
            assert what in definitions(path), f"{question} {name}: {what}"


def test_the_page_of_a_step_is_what_the_code_declares() -> None:
    page = step_map.PAGE.read_text(encoding="utf-8")
    assert page == step_map.updated(page), "run tests/step_map.py"
    for word in ("_step_kernel", "`vlm_rms_norm`", "`DeltaNet`", "`Attend`", "torch.searchsorted"):
        assert word in page


def test_the_page_of_a_step_has_the_projections_that_end_a_branch() -> None:
    page = step_map.PAGE.read_text(encoding="utf-8")
    mixers = [each for each in page.split("\n## ") if each.startswith("Token mixer")]
    assert len(mixers) >= 4
    for mixer in mixers:
        assert "| `Product` of `out_proj` |" in mixer
        assert "| projection `out_proj`, plus the residual |" in mixer


def product_calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """Yield the calls of the product's code, each with its file and its function's last name."""
    for folder in PRODUCT:  # whose links are not followed
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield path, ast.unparse(node.func).rpartition(".")[2], node


def given_name(function: str, call: ast.Call) -> ast.expr | None:
    """Return the argument that names a thread; None if it has no name."""
    if function == "in_daemon_thread":
        return call.args[0]
    wanted = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}[function]
    return next((each.value for each in call.keywords if each.arg == wanted), None)


def test_every_thread_that_the_product_starts_is_in_the_table() -> None:
    text, seen = (DOCS / "threads.md").read_text(encoding="utf-8"), 0
    for path, function, call in product_calls():
        if function not in ("Thread", "ThreadPoolExecutor", "in_daemon_thread"):
            continue
        name = given_name(function, call)
        if isinstance(name, ast.JoinedStr):
            name = name.values[0]
        if isinstance(name, ast.Constant):
            assert f"`{name.value!s}`" in text, f"{path.name}: a thread {name.value!s}"
            seen += 1
        elif path.name != "daemon_thread.py":
            short = str(path.relative_to(ROOT)).removeprefix("vlm_serve/")
            assert f"`{short}`" in text or f"`vlm_serve/{short}`" in text, short
    assert seen >= 10


def test_every_process_that_the_product_starts_is_in_the_table() -> None:
    text, seen = (DOCS / "threads.md").read_text(encoding="utf-8"), 0
    for path, _, call in product_calls():
        called = ast.unparse(call.func)
        if called in ("child.command", "children.start") and path.name != "children.py":
            module = ast.literal_eval(call.args[0])
            assert f"process `{module}`" in text, f"{path.name}: a process {module}"
            seen += 1
    assert seen > 2


def test_the_table_of_threads_has_every_row_of_the_server() -> None:
    text = (DOCS / "threads.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:process )?`([\w.-]+)`", text, re.MULTILINE)
    assert {group.name for group in worker_table(4)} <= {*rows}
    for group in worker_table(4):
        if group.kind == "process":
            assert f"| process `{group.name}` |" in text


def test_the_glossary_is_in_order_and_says_a_word_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([\w -]+) \|", text, re.MULTILINE)[1:]
    assert words == sorted(set(words))
    assert len(words) > 30


def test_every_noun_of_the_core_has_an_owner() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    owners = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`|]+)` \|$", text, re.MULTILINE))
    assert owners.keys() >= CORE
    for word, path in owners.items():
        exists = (ROOT / path).is_file() or (ROOT / "vlm_serve" / path).is_file()
        assert exists, f"{word}: {path}"
