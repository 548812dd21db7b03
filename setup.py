"""Do what pyproject.toml cannot say: check the source, correct editable installations, name the
platform of wheels with compiled kernels, and make the text for a package index."""

import os
import re
import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.editable_wheel import editable_wheel

HERE = Path(os.path.abspath(__file__)).parent
PACKAGE = HERE / "vlm_serve"
RELATIVE = r"(?!https?:|data:|mailto:)[^)\s\"]*"


class EditableWheel(editable_wheel):
    """Name the package alone: all that is below it is found there.

    For packages without an __init__.py setuptools would put the name of a folder that does not
    exist on Python's path. It would lead from the current one: a checkpoint with such a folder in
    it could bring another vlm_serve.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.distribution.packages = ["vlm_serve"]


class PlatformWheel(bdist_wheel):
    """Name the platform of a wheel with compiled kernels, and no version of Python.

    They are plain shared libraries. `release/wheels.py` gives the platform by `--plat-name`.
    """

    def get_tag(self) -> tuple[str, str, str]:
        if not with_kernels():
            return super().get_tag()
        return "py3", "none", self.plat_name.replace("-", "_").replace(".", "_")


class PlatformDistribution(Distribution):
    """Install the package where a platform's packages go, if it has compiled kernels."""

    def has_ext_modules(self) -> bool:
        return with_kernels()


def with_kernels() -> bool:
    """Return True if libraries lie in the package's folder, as in the tree of a wheel."""
    return any((PACKAGE / "kernels" / "shipped").glob("*.so"))


def for_an_index(text: str) -> str:
    """Return the README without pictures and links that lead nowhere outside of a checkout."""
    text = re.sub(rf"<img src=\"{RELATIVE}\"[^>]*>", "", text)
    text = re.sub(rf"!\[[^\]]*\]\({RELATIVE}\)", "", text)
    text = re.sub(rf"\[([^\]]*)\]\({RELATIVE}\)", r"\1", text)
    note = "The documents named here are in the source distribution, below `docs/`.\n\n## Start"
    return re.sub(r"\n{3,}", "\n\n", text).replace("## Start", note, 1)


# Without its links the package would be built without most of its modules, and successfully.
problem = runpy.run_path(str(PACKAGE / "system" / "links.py"))["find_problem"](str(PACKAGE))
if problem:
    raise SystemExit(f"error: {problem}")
setup(
    distclass=PlatformDistribution,
    cmdclass={"bdist_wheel": PlatformWheel, "editable_wheel": EditableWheel},
    long_description=for_an_index((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
