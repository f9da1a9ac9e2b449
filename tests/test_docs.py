"""Tables in docs/ that name tests: every kind of fault is there, and every test that is named exists."""

import ast
import re
from pathlib import Path

from harness.mutants.mutant import KINDS

ROOT = Path(__file__).resolve().parent.parent


def rows() -> dict[str, str]:
    """The cells of docs/faults.md that name tests, by kind."""
    lines = re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert len(dict(lines)) == len(lines), "a kind has two rows"
    return dict(lines)


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_kind_of_fault_has_a_row():
    assert rows().keys() == KINDS.keys()


def test_every_named_test_exists():
    named = {kind: re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell) for kind, cell in rows().items()}
    assert {kind for kind, tests in named.items() if not tests} == set()
    missing = [(file, name) for tests in named.values() for file, name in tests if name not in functions_in(file)]
    assert missing == []
