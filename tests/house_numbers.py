"""Counts what a reader of this house meets: lines of code, first words and sentences of its prose.

    .venv/bin/python tests/house_numbers.py [FOLDER ...]

Prints one row a folder (by default the product's with their sum, then the other ones), and the
documents' sentences. `--first` lists functions' docstrings with a first word of `BANNED`, `--long`
the sentences above `LONGEST` words, each with its place. The columns:

    files       of Python
    python      their lines
    c++, page   lines of compiled code, and of what a browser reads; `vendor` is not ours
    lines       the sum of the three
    code        lines of Python with something else than comments and docstrings
    docstrings  their number
    words       in a mean sentence of them
    layers      files in the longest chain of which each imports the next
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from import_graph import house_graph, layers, placed
from own_sources import OTHERS, PRODUCT, ROOT, own_files, python_files

COMPILED = (".cpp", ".h")
PAGE = (".css", ".html", ".js", ".mjs")
LONGEST = 45
"""The most words that a sentence may have."""
BANNED = frozenset({"What", "Of", "That", "So", "Whose", "Whether", "Raises"})
"""First words that make a docstring a clause without its main verb."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """One docstring and its place.

    Attributes:
        path: the file.
        line: of its owner, from 1.
        of_function: its owner is a function or method that is no property.
        text: with the indentation taken off.
    """

    path: Path
    line: int
    of_function: bool
    text: str

    @property
    def first_word(self) -> str:
        """The first word, without what is not a letter."""
        words = self.text.split(maxsplit=1)
        return re.sub(r"\W", "", words[0]) if words else ""

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass
class Numbers:
    """Counts of one folder or of several; the module's docstring says what each is."""

    files: int = 0
    python: int = 0
    compiled: int = 0
    page: int = 0
    code_lines: int = 0
    docstrings: list[Docstring] = field(default_factory=list)

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.files + other.files,
            self.python + other.python,
            self.compiled + other.compiled,
            self.page + other.page,
            self.code_lines + other.code_lines,
            self.docstrings + other.docstrings,
        )

    @property
    def lines(self) -> int:
        """Lines of our own, of every kind."""
        return self.python + self.compiled + self.page

    @property
    def sentences(self) -> list[str]:
        """The sentences of all docstrings."""
        return [sentence for each in self.docstrings for sentence in sentences(each.text)]


def docstrings_of(path: Path) -> list[Docstring]:
    """Read the docstrings of a file's module, classes and functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                of_function = function and not is_property(node)
                found.append(Docstring(path, getattr(node, "lineno", 1), of_function, text))
    return found


def is_property(node: ast.AST) -> bool:
    """Tell whether a function is read as an attribute."""
    names = {ast.unparse(each) for each in getattr(node, "decorator_list", [])}
    return bool(names & {"property", "cached_property", "functools.cached_property"})


def code_lines(path: Path) -> int:
    """Count lines that hold a token which is neither a comment nor a docstring."""
    text = path.read_text(encoding="utf-8")
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    fresh = True  # At the start of a statement, where a string alone documents something.
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in zip(tokens, tokens[1:], strict=False):
        if token.type in ignored or token.type == tokenize.ENDMARKER:
            fresh = fresh or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        documents = fresh and token.type == tokenize.STRING and after.type == tokenize.NEWLINE
        if not documents:
            lines.update(range(token.start[0], token.end[0] + 1))
        fresh = False
    return len(lines)


def sentences(text: str) -> list[str]:
    """Split prose into sentences; what is indented, in tables, lists of names or code is left out
    where it is no sentence."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"^(\||#|!|<|    |\s*(Args|Attributes|Raises|Returns|Yields):).*$", "\n", text, flags=re.M
    )
    text = re.sub(r"^(\s*([-*]|\d+\.)|\s+`?\w+`?:) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "name", text)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        found += [each for each in re.split(r"(?<=[.!?])\s+(?=[\"'(\[*A-Za-z0-9])", joined) if each]
    return found


def mean_words(found: list[str]) -> float:
    """Return the words per sentence."""
    return sum(len(each.split()) for each in found) / max(1, len(found))


def numbers_of(folder: Path) -> Numbers:
    """Count a folder."""
    numbers = Numbers()
    numbers.compiled = lines_of(own_files(folder, COMPILED))
    numbers.page = lines_of(own_files(folder, PAGE))
    for path in python_files(folder):
        numbers.files += 1
        numbers.python += lines_of([path])
        numbers.code_lines += code_lines(path)
        numbers.docstrings += docstrings_of(path)
    return numbers


def lines_of(paths: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def documents() -> list[Path]:
    """Return the documents that a reader opens; what has changed is a list, not prose."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", help="by default the whole house")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    print(f"{'folder':24}{'files':>6}{'python':>8}{'c++':>7}{'page':>7}", end="")
    print(f"{'lines':>8}{'code':>8}{'docstrings':>11}{'words':>7}{'layers':>7}")
    folders = options.folders or [*PRODUCT, *OTHERS]
    counted = {name: numbers_of(ROOT / name) for name in folders}
    for name, numbers in counted.items():
        print_row(name, numbers, layers_below(name))
        if options.first:
            show_first_words(numbers)
        if options.long:
            for each in numbers.docstrings:
                show_long(each.place, each.text)
        if name == PRODUCT[-1] and not options.folders:
            numbers = sum((counted[each] for each in PRODUCT), Numbers())
            print_row("the product", numbers, layers_below(*PRODUCT))
    for path in documents():
        text = path.read_text(encoding="utf-8")
        found = sentences(text)
        mean = mean_words(found)
        print(f"{path.relative_to(ROOT)!s:24}{'':28}{text.count(chr(10)):8}{'':19}{mean:7.1f}")
        if options.long:
            show_long(str(path.relative_to(ROOT)), text)


def layers_below(*folders: str) -> int:
    """Return the layers of the files below some folders."""
    return layers(
        house_graph(), [placed(path) for name in folders for path in python_files(ROOT / name)]
    )


def print_row(name: str, numbers: Numbers, layers: int) -> None:
    """Print the numbers of a folder."""
    print(f"{name:24}{numbers.files:6}{numbers.python:8}{numbers.compiled:7}", end="")
    print(f"{numbers.page:7}{numbers.lines:8}{numbers.code_lines:8}", end="")
    print(f"{len(numbers.docstrings):11}{mean_words(numbers.sentences):7.1f}{layers:7}")


def show_first_words(numbers: Numbers) -> None:
    """Print the functions' docstrings with a banned first word."""
    for each in numbers.docstrings:
        if each.of_function and each.first_word in BANNED:
            print(f"    {each.place}: {each.first_word}")


def show_long(place: str, text: str) -> None:
    """Print the sentences of a text that are longer than `LONGEST`."""
    for each in sentences(text):
        if len(each.split()) > LONGEST:
            print(f"    {place}: {len(each.split())} words: {each[:90]} ...")


if __name__ == "__main__":
    main()
