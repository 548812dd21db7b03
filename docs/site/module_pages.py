"""The directive `modules` of Sphinx: what a folder's modules are about, by their docstrings."""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from docutils import nodes
from module_texts import ROOT, beginning, modules_of, public_names
from sphinx.util.docutils import SphinxDirective


class Modules(SphinxDirective):
    """`{modules} FOLDER`, a folder of the checkout."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        found = nodes.definition_list(classes=["modules"])
        for name, module in modules_of(ROOT / self.arguments[0]):
            term = nodes.term("", "", nodes.literal(text=name))
            body = nodes.definition("", nodes.paragraph(text=beginning(ast.get_docstring(module))))
            names = nodes.bullet_list()
            for each, said in public_names(module):
                line = nodes.paragraph("", "", nodes.literal(text=each), nodes.Text(f" {said}"))
                names += nodes.list_item("", line)
            if names.children:
                body += names
            found += nodes.definition_list_item("", term, body)
        return [found]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("modules", Modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
