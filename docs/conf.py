"""How Sphinx builds these pages: ``sphinx-build -W --keep-going docs build/docs``.

Nothing is fetched. The reference is made from the docstrings, the tables from the package.
"""

from __future__ import annotations

import cudnn_mha
from cudnn_mha import extended_ops, ops
from cudnn_mha.checks import HAZARDS

project = "cudnn_mha"
author = "the authors of cudnn_mha"
version = release = cudnn_mha.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",  # loaded by readers of the one page that has a formula, not by the build
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]

autodoc_mock_imports = ["thunder"]  # which loads with few releases of PyTorch

html_theme = "furo"
html_title = f"cudnn_mha {release}"
html_show_copyright = False

# The picture is set into its page, where it takes the theme's colours.
exclude_patterns = ["_static"]

default_role = "py:obj"  # a name in single backticks is one of ours, or else just code
napoleon_use_ivar = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

myst_enable_extensions = ["deflist", "substitution"]
myst_heading_anchors = 4


def _hazards() -> str:
    """`HAZARDS` in Markdown."""
    rows = [("fault", "condition", "what is done", "cost", "seen"), ("---",) * 5]
    rows += [(f"`{h.name}`", h.condition, h.remedy, h.cost, h.source) for h in HAZARDS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _schemas() -> str:
    """The operators' schemas, an argument a line."""
    texts = []
    operators = (
        ops.sdpa_forward,
        ops.sdpa_backward,
        ops.sdpa_inference,
        *(getattr(extended_ops, name) for name in extended_ops.NAMES),
    )
    for operator in operators:
        given, returned = str(operator.default._schema).split(" -> ")
        given = given.replace("(", "(\n    ", 1).replace(", ", ",\n    ")
        texts.append(f"```text\n{given[:-1]}\n) -> {returned}\n```")
    return "\n\n".join(texts)


myst_substitutions = {"hazards": _hazards(), "schemas": _schemas()}
