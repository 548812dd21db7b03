"""Wheels with compiled kernels, of small sources: their names, what is in them, and their start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import libraries
import pytest
import wheels
from libraries import PROCESSORS, compiler_for
from wheels import ROOT, build, platform_wheel, tracked

import vlm_serve
from vlm_serve.kernels import native_build
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_processor import architecture

SOURCE = """#include <cstdint>
extern "C" int64_t vlm_self_test(uint64_t* digests) {
    digests[0] = %d;
    digests[1] = digests[2] = digests[3] = 0;
    return 0;
}
"""
pytestmark = pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this tree."""
    return build(tracked(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist"), "sdist")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources in place of the kernels', with the digest 7."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "self_test.cpp").write_text(SOURCE % 7)
    monkeypatch.setattr(native_build, "SOURCES", (folder,))
    monkeypatch.setattr(wheels, "FLOAT32", f"{7:016x}")
    return folder


def made(source: Path, machine: str, folder: Path) -> Path:
    """Build a wheel, or skip the test if there is no compiler for it."""
    try:
        compiler_for(machine)
    except BuildError as error:
        pytest.skip(str(error))
    (folder / "dist").mkdir()
    return platform_wheel(source, machine, folder / "dist", folder / "kept")


@pytest.mark.parametrize("machine", PROCESSORS)
def test_a_wheel_is_for_a_platform_and_every_python(
    source: Path, small: Path, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = made(source, machine, tmp_path)
    tag = f"py3-none-manylinux_2_28_{machine}"
    assert wheel.name == f"vlm_serve-{vlm_serve.__version__}-{tag}.whl"
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        index = json.loads(archive.read("vlm_serve/kernels/shipped/index.json"))
        (described,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        about = archive.read(described).decode()
    assert f"Tag: {tag}\n" in about and "Root-Is-Purelib: false" in about
    shipped = sorted(name for name in names if name.endswith(".so"))
    assert [each["arch"] for each in index["libraries"]] == list(PROCESSORS[machine])
    assert shipped == sorted(
        f"vlm_serve/kernels/shipped/{each['file']}" for each in index["libraries"]
    )
    assert index["sources"] == native_build.sources_digest().hex()
    assert capsys.readouterr().out.count(" after ") == len(shipped)
    for each in index["libraries"]:
        wanted = {"x86_64": "avx2", "aarch64": "atomics"}[machine]
        assert each["machine"] == machine and wanted in each["needs"]


def test_what_was_compiled_is_used_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    first = list(libraries.libraries(architecture(), tmp_path / "one", kept))
    monkeypatch.setattr(libraries, "compile_to", None)
    again = list(libraries.libraries(architecture(), tmp_path / "two", kept))
    assert first == again and len(first) == len(PROCESSORS[architecture()])
    for each in first:
        one, two = (tmp_path / name / each.file for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_a_library_with_other_arithmetic_is_not_packed(
    source: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "self_test.cpp").write_text(SOURCE % 8)
    monkeypatch.setitem(PROCESSORS, architecture(), PROCESSORS[architecture()][-1:])
    with pytest.raises(BuildError, match="computes 0000000000000008, not 0000000000000007"):
        made(source, architecture(), tmp_path)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    foreign = next(name for name in PROCESSORS if name != architecture())
    with pytest.raises(BuildError, match=f"{foreign}-linux-gnu-g\\+\\+ was not found: it is in"):
        compiler_for(foreign)


def test_an_installed_wheel_loads_its_library_without_a_compiler(
    source: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small sources, which the unpacked wheel gets as well."""
    monkeypatch.setitem(PROCESSORS, architecture(), PROCESSORS[architecture()][-1:])
    wheel, site = made(source, architecture(), tmp_path), tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (
        "import sys, torch\n"
        "from vlm_serve.kernels import native_build, native_library, native_self_test\n"
        "native_build.SOURCES = (native_build.Path(sys.argv[1]),)\n"
        "native_self_test.FLOAT32 = f'{7:016x}'\n"
        "native_library.load()\n"
        "print(native_library.shipped().path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(small)],
        env={**os.environ, "PYTHONPATH": str(site), "PATH": "/nowhere", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = Path(done.stdout.strip())
    assert loaded.parent == site / "vlm_serve" / "kernels" / "shipped", done.stderr
    assert loaded.suffix == ".so" and not (tmp_path / ".cache").exists()


def test_the_text_for_an_index_leads_nowhere_that_is_missing(source: Path, tmp_path: Path) -> None:
    wheels.unpack(source, tmp_path)
    (about,) = tmp_path.glob("*/PKG-INFO")
    text = Parser().parsestr(about.read_text(encoding="utf-8"))
    assert text["Version"] == vlm_serve.__version__ and text["Author"] == "vlm-serve developers"
    body = text.get_payload()
    assert isinstance(body, str) and body.startswith("# vlm-serve")
    assert "<img" not in body and "![" not in body
    links = [each.split(")")[0] for each in body.split("](")[1:]]
    assert all(link.startswith(("https://", "http://")) for link in links), links
    assert (about.parent / "docs" / "install.md").is_file()
    assert (ROOT / "docs" / "screenshots").is_dir() and not (about.parent / "tests").exists()
