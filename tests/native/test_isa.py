"""What `make test-isa` compares, for the two processors that most machines can run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native.isa import (
    EXTRA_FLAGS,
    FOLDER,
    Outcome,
    Report,
    differences,
    kernel,
    outcome,
    parsed,
    summary,
)

from vlm_serve.kernels.native_build import BuildError, recipe
from vlm_serve.kernels.native_library import FUNCTIONS


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome(processor) for processor in ("native", "x86-64-v3")]


@pytest.mark.processors
def test_results_do_not_depend_on_threads_and_other_rows(outcomes: list[Outcome]) -> None:
    native = outcomes[0]
    if not native.report:
        pytest.skip(native.note)
    assert not native.report.differing
    assert {kernel(case) for case in native.report.digests} == set(FUNCTIONS)


@pytest.mark.processors
def test_results_do_not_depend_on_the_processor(outcomes: list[Outcome]) -> None:
    assert not list(differences(outcomes))
    for each in outcomes:
        # Few machines run its code, all compile it.
        if not each.report and (each.processor, each.state) != ("sapphirerapids", "compiled only"):
            pytest.skip(f"{each.processor}: {each.note}")


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_cases_fit_the_calls_of_the_kernels(source: Path) -> None:
    try:
        how = recipe()
    except BuildError as error:
        pytest.skip(str(error))
    command = [how.compiler, *how.flags, *EXTRA_FLAGS, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-4000:]


def ran(processor: str, products: str, **digests: str) -> Outcome:
    cases = {f"float32 {name}": "0" for name in FUNCTIONS}
    cases |= {name.replace("_vlm", " vlm", 1): digest for name, digest in digests.items()}
    return Outcome(processor, "run", "", Report(products, cases))


def test_differences_name_kernel_and_case() -> None:
    first = ran("native", "singles", float32_vlm_linear="1")
    assert list(differences([first, ran("znver4", "pairs", float32_vlm_linear="2")])) == [
        "vlm_linear: float32 vlm_linear is 2 on znver4, 1 on native"
    ]


def test_bfloat16_is_compared_where_it_is_multiplied_alike() -> None:
    first = ran("native", "singles", bf16_vlm_linear="1")
    assert not list(differences([first, ran("znver4", "pairs", bf16_vlm_linear="2")]))
    assert list(differences([first, ran("x86-64-v3", "singles", bf16_vlm_linear="2")]))


def test_what_is_printed() -> None:
    report = parsed(
        "width 8\nproducts pairs\nfloat32 vlm_gates/1 ab\ndiffers bf16 vlm_gates/1: 2 threads\n"
    )
    assert report == Report(
        "pairs", {"float32 vlm_gates/1": "ab"}, ("bf16 vlm_gates/1: 2 threads",)
    )
    outcomes = [
        Outcome("native", "run", "", report),
        Outcome("armv8.2-a", "not built", "aarch64-linux-gnu-g++ was not found"),
    ]
    lines = list(summary(outcomes))
    assert "2 processors: 1 run, 0 compiled only, 1 not built" in lines
    assert any("aarch64-linux-gnu-g++ was not found" in line for line in lines)
    wrong = list(differences(outcomes))
    assert "native: bf16 vlm_gates/1: 2 threads differ" in wrong
    assert "native: no case calls vlm_linear" in wrong
