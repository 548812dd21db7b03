"""Check the source and correct editable installations, which pyproject.toml cannot say."""

import os
import runpy

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Name the package alone: all that is below it is found there.

    For packages without an __init__.py setuptools would put the name of a folder that does not
    exist on Python's path. It would lead from the current one: a checkpoint with such a folder in
    it could bring another vlm_serve.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.distribution.packages = ["vlm_serve"]


package = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vlm_serve")
# Without its links the package would be built without most of its modules, and successfully.
problem = runpy.run_path(os.path.join(package, "links.py"))["find_problem"](package)
if problem:
    raise SystemExit(f"error: {problem}")
setup(cmdclass={"editable_wheel": EditableWheel})
