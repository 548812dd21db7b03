"""The layout that imports, packaging and readers rely on."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from house_numbers import (
    BANNED,
    LONGEST,
    Docstring,
    docstrings_of,
    documents,
    mean_words,
    sentences,
)
from import_graph import circles, folder_graphs, house_graph, imported_names
from own_sources import LINKS, PRODUCT, ROOT
from own_sources import python_files as files_below

CODE = (
    "vlm_serve",
    "cache",
    "kernels",
    "preprocess",
    "tests",
    "examples",
    "train_demo",
    "benchmarks",
)
MAX_LINES = 800
"""Of a file. Decisions are bounded by functions; a lower bound cut ideas in two."""
# Bytes. The built-in models' weights are the largest files.
LARGEST_FILE = 5_000_000


def python_files(*folders: str) -> list[Path]:
    """Return the source files below the folders."""
    found = [path for folder in folders for path in files_below(ROOT / folder)]
    assert found
    return found


def imported_modules(path: Path) -> list[str]:
    return [
        name
        for module, member in sorted(imported_names(path))
        for name in ([module, f"{module}.{member}"] if member else [module])
    ]


@pytest.mark.parametrize("name", LINKS)
def test_root_folders_are_linked_into_the_package(name: str) -> None:
    link = ROOT / "vlm_serve" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists(), "it would hide packages of that name"


def test_imports_go_through_the_package() -> None:
    for path in python_files(*CODE):
        assert not {name.split(".")[0] for name in imported_modules(path)} & {*LINKS}, path


ABOVE_THE_CORE = ("features", "steps", "start", "engine", "described")
"""Rooms that the core step imports nothing of: a feature reaches it through its hooks alone."""


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        (
            "preprocess",
            ("vlm_serve.engine", "vlm_serve.server", "vlm_serve.cache", "vlm_serve.models"),
        ),
        ("cache", ("vlm_serve.engine", "vlm_serve.server", "vlm_serve.models", "torch")),
        (
            "kernels",
            ("vlm_serve.engine", "vlm_serve.server", "vlm_serve.models", "vlm_serve.cache"),
        ),
        ("vlm_serve/models", ("vlm_serve.engine", "vlm_serve.server", "vlm_serve.cache")),
        ("vlm_serve/engine", ("vlm_serve.server", "fastapi", "uvicorn")),
        ("vlm_serve/engine/core", tuple(f"vlm_serve.engine.{name}" for name in ABOVE_THE_CORE)),
        ("vlm_serve/engine/requests", ("vlm_serve.engine.core", "vlm_serve.engine.steps")),
        ("vlm_serve/engine/features", ("vlm_serve.engine.steps", "vlm_serve.engine.start")),
        ("vlm_serve/engine/steps", ("vlm_serve.engine.start", "vlm_serve.engine.engine")),
        (
            "vlm_serve/server/failover",
            ("vlm_serve.server.http", "vlm_serve.server.answers", "vlm_serve.server.api"),
        ),
        (
            "vlm_serve/server/http",
            ("vlm_serve.server.answers", "vlm_serve.server.api", "vlm_serve.server.service"),
        ),
        ("vlm_serve/server/answers", ("vlm_serve.server.api",)),
        (
            "vlm_serve/server",
            ("vlm_serve.batch", "vlm_serve.deploy", "vlm_serve.models", "vlm_serve.kernels"),
        ),
        ("vlm_serve/batch", ("vlm_serve.deploy", "vlm_serve.eval")),
        (
            "vlm_serve/routing",
            ("vlm_serve.engine", "vlm_serve.server", "vlm_serve.cache", "torch", "ray", "fastapi"),
        ),
    ],
)
def test_arrows_between_parts_point_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    for path in python_files(folder):
        for name in imported_modules(path):
            assert not any(name == bad or name.startswith(bad + ".") for bad in forbidden), path


def test_one_place_asks_transformers() -> None:
    """It takes a good part of a start; configurations are all that is wanted of it."""
    product = python_files("vlm_serve", "cache", "kernels", "preprocess")
    users = [
        path.relative_to(ROOT)
        for path in product
        if any(name.split(".")[0] == "transformers" for name in imported_modules(path))
    ]
    assert users == [Path("vlm_serve/models/registry.py")]


CONTENT_TYPES = {
    *("image_url", "input_image", "input_text", "input_video", "output_text", "video_url"),
    *("function_call_output", "server_tool_use", "tool_result", "tool_use"),
    *("redacted_thinking", "item_reference", "tool_reference"),
}
"""Types of parts, blocks and items of messages; only `preprocess/reading` reads them."""

NAMING_CONTENT = {
    Path("vlm_serve/batch/video_qa.py"),  # It writes requests.
    Path("vlm_serve/server/api/messages.py"),  # It writes answers.
    Path("vlm_serve/server/api/responses/new_turn.py"),  # It gives items ids by their types.
    Path("vlm_serve/server/api/responses/stored.py"),  # It lists stored items in one form.
    Path("vlm_serve/server/api/responses/route.py"),  # It writes answers.
}
"""Other modules that name such a type, each for its own reason."""


def test_one_reader_walks_the_content_of_messages() -> None:
    naming = {
        path.relative_to(ROOT)
        for path in python_files(*PRODUCT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in CONTENT_TYPES
    }
    reading = {path for path in naming if path.parent == Path("preprocess/reading")}
    assert reading
    assert naming - reading == NAMING_CONTENT


STARTING = {
    Path("kernels/native_build.py"),  # The compiler.
    Path("vlm_serve/eval/lmms.py"),  # What a user names, by itself a command of `child`.
}
"""What starts processes that are not Python's, so without `vlm_serve.system.child`."""


def names_of_starts(path: Path) -> set[str]:
    """What a module has to start processes of Python with."""
    found = {
        name
        for name in imported_modules(path)
        if name in ("pty", "concurrent.futures.ProcessPoolExecutor", "torch.multiprocessing")
        or (name.startswith("multiprocessing") and "connection" not in name)
    }
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if re.fullmatch(r"sys\.\w*executable|os\.(exec|\w*spawn|system|popen)\w*", name):
                found.add(name)
        elif isinstance(node, ast.Constant) and node.value in ("PYTHONPATH", "PYTHONSAFEPATH"):
            found.add(node.value)
    return found


def test_one_place_says_how_python_is_started() -> None:
    """A child started by hand imports from the folder that the server was started in."""
    by_hand = {path.relative_to(ROOT) for path in python_files(*PRODUCT) if names_of_starts(path)}
    assert by_hand == {Path("vlm_serve/system/child.py")}
    starting = {
        path.relative_to(ROOT)
        for path in python_files(*PRODUCT)
        if "subprocess" in imported_modules(path)
        and not {"vlm_serve.system.child"} & set(imported_modules(path))
    }
    assert starting == STARTING


def test_no_circle_of_files_or_folders() -> None:
    """Nowhere: product, tests, benchmarks, examples and releases; for the types alone neither."""
    graph = {place: set(others) for place, others in house_graph().items()}
    assert {Path("vlm_serve/__init__.py"), Path("vlm_serve/eval/lmms_model.py")} <= graph.keys()
    assert not circles(graph)
    for folder, entries in folder_graphs(graph).items():
        assert not circles(entries), folder
    # The package's own names need nearly everything, so nothing may import the package for them.
    graph[Path("vlm_serve/preprocess/media/decoders.py")].add(Path("vlm_serve/__init__.py"))
    (circle,) = circles(graph)
    assert Path("vlm_serve/__init__.py") in circle


NATIVE = ("kernels/native", "vlm_serve/models/native", "tests/native")


def native_includes() -> dict[str, set[str]]:
    """Return the headers that each native source includes, by paths from the root."""
    paths = [
        path
        for folder in NATIVE
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".h", ".cpp")
    ]
    found = {}
    for path in paths:
        names = re.findall(r'^#include "(.+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
        places = [ROOT / folder / name for name in names for folder in NATIVE]
        own = str(path.relative_to(ROOT))
        found[own] = {str(each.relative_to(ROOT)) for each in places if each.is_file()}
        assert len(found[own]) == len(set(names)), f"{own} includes something else"
    assert len(found) > 40
    return found


def test_native_headers_include_in_one_direction() -> None:
    included = native_includes()
    assert not circles(included)
    for path, headers in included.items():
        if path.startswith("kernels/"):
            assert all(header.startswith("kernels/") for header in headers), path


def test_native_sources_fit_in_a_few_looks() -> None:
    lines = {
        path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path in native_includes()
    }
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def imported_at_once(path: Path) -> list[str]:
    """Return the modules that a file imports when it is imported, outside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return names


def test_nothing_needs_the_evaluation_or_the_examples() -> None:
    """They stay removable: only the command line imports `eval`, when a command is run."""
    beside = ("examples", "train_demo")
    examples = {path.stem for path in python_files(*beside)}.union(beside)
    for path in python_files(*PRODUCT):
        assert not examples & {name.split(".")[0] for name in imported_modules(path)}, path
        if Path("vlm_serve/eval") in path.relative_to(ROOT).parents:
            continue
        needs = [name for name in imported_modules(path) if name.startswith("vlm_serve.eval")]
        assert not needs or path == ROOT / "vlm_serve" / "cli.py"
        assert not [name for name in imported_at_once(path) if name.startswith("vlm_serve.eval")]


@pytest.mark.parametrize("folder", ["vlm_serve/eval", "train_demo"])
def test_what_stands_beside_the_core_explains_itself(folder: str) -> None:
    words = set(re.findall(r"\w+", (ROOT / folder / "README.md").read_text(encoding="utf-8")))
    modules = {path.stem for path in python_files(folder)} - {"__init__"}
    assert not {name for name in modules - words if not name.startswith("demo_")}


def test_cache_reads_no_clock() -> None:
    for path in python_files("cache"):
        assert not {"time", "datetime"} & set(imported_modules(path)), path


@pytest.mark.parametrize("folder", CODE)
def test_files_fit_in_a_few_looks(folder: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(folder)
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES
    }
    assert not long


def product_docstrings() -> list[Docstring]:
    return [each for path in python_files(*PRODUCT) for each in docstrings_of(path)]


def test_docstrings_of_functions_are_sentences() -> None:
    """Ruff's D401 knows wrong forms of verbs; this knows clauses without a main verb."""
    functions = [each for each in product_docstrings() if each.of_function]
    assert not [
        f"{each.place}: {each.first_word}" for each in functions if each.first_word in BANNED
    ]


def test_sentences_are_short_and_plain() -> None:
    texts = {each.place: each.text for each in product_docstrings()}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in documents()}
    long = [
        f"{place}: {sentence}"
        for place, text in texts.items()
        for sentence in sentences(text)
        if len(sentence.split()) > LONGEST
    ]
    assert not long
    for path in documents():
        assert mean_words(sentences(path.read_text(encoding="utf-8"))) <= 18, path.name


def test_the_repository_holds_no_packages_and_few_large_files() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a repository")
    tracked = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    kept = [path for path in tracked if path.is_file() and not path.is_symlink()]
    packages = [path.name for path in kept if path.suffix in {".whl", ".gz", ".zip", ".egg"}]
    assert not packages, "a download in the source folder was committed"
    large = [path.name for path in kept if path.stat().st_size > LARGEST_FILE]
    assert not large


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in pins)
    names = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    assert "torchvision" not in names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        name = (
            requirement.split("[")[0].split(">")[0].split("=")[0].strip().lower().replace("_", "-")
        )
        assert name in names, requirement


def test_a_wheel_contains_the_linked_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: an old build/ folder would be packed too
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in ("vlm_serve", *LINKS):
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", ".*"),
        )
    build = f"import setuptools.build_meta as build; build.build_wheel({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    for path in python_files("vlm_serve"):
        assert str(path.relative_to(ROOT)) in packed
    for name in LINKS:
        for path in python_files(name):
            assert f"vlm_serve/{path.relative_to(ROOT)}" in packed
    for folder in ("kernels", "models"):
        for path in (ROOT / "vlm_serve" / folder / "native").rglob("*.*"):
            assert str(path.relative_to(ROOT)) in packed
    assert "vlm_serve/py.typed" in packed
    for path in (ROOT / "vlm_serve" / "demo").rglob("*.*"):
        assert str(path.relative_to(ROOT)) in packed
    for path in (ROOT / "vlm_serve" / "server" / "page").rglob("*.*"):
        assert str(path.relative_to(ROOT)) in packed
    tops = {name.split("/")[0] for name in packed}
    assert len(tops) == 2, "one package and its metadata, nothing beside them"
