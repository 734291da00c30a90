"""What users of an installed package read names no file that only a checkout has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


def texts_for_users(path):
    """Messages, and the docstrings of public modules and of what is public in them."""
    tree = ast.parse(path.read_text())
    inside = path.relative_to(SOURCES).parts
    internal = "primitives" in inside or any(re.match("_(?!api|_init__)", part) for part in inside)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value): getattr(node, "name", "")
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            owner = docstrings.get(id(node))
            if owner is None or not (internal or owner.startswith("_")):
                yield node.value


def test_no_text_for_users_names_a_file_of_a_checkout():
    texts = [text for path in SOURCES.rglob("*.py") for text in texts_for_users(path)]
    assert any("Give this user the rights" in text for text in texts)
    assert not [text for text in texts if re.search(r"\bdocs/|\.md\b|\bscripts/", text)]
