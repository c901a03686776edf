"""The layout keeps its promises: what each package may import, and that nothing outside ``methods`` knows a method."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrolex.core.registry import METHODS
from fedrolex.methods.method import Method

SOURCE = Path(__file__).parents[1] / "src" / "fedrolex"
BELOW = {
    "core": set[str](),
    "slicing": {"core"},
    "models": {"core", "slicing"},
    "data": {"core"},
    "theory": {"core", "slicing"},
    "tasks": {"core", "slicing", "models", "data"},
    "clients": {"core", "slicing", "tasks"},
    "rounds": {"core", "slicing", "tasks", "clients"},
    "engines": {"core", "slicing", "models", "tasks", "clients", "rounds"},
    "methods": {"core", "slicing", "models", "tasks", "clients", "rounds", "privacy"},
    "recipes": {"core", "slicing", "models", "data", "tasks", "clients", "rounds", "methods"},
    "runs": {"core", "slicing", "models", "data", "tasks", "clients", "rounds", "engines", "methods", "recipes"},
    "privacy": {"core", "slicing", "tasks", "clients", "rounds"},
    "flower": {"core", "slicing", "tasks", "clients", "rounds", "engines", "methods", "recipes", "runs", "privacy"},
    "report": {"core", "slicing", "models", "theory", "tasks", "clients", "rounds", "methods", "recipes", "runs"},
}
"""The packages that each package may import from; ``cli`` and the package itself may import all."""

LONGEST = 400


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """The packages of this project that a module imports from."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, _, rest = name.partition(".")
            if first == "fedrolex" and rest:
                yield rest.partition(".")[0]


@pytest.mark.parametrize("name", BELOW)
def test_a_package_imports_only_what_lies_below_it(name: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {found}"
        for path in modules()
        if package(path) == name
        for found in imports(ast.parse(path.read_text()))
        if found not in BELOW[name] | {name}
    ]
    assert not wrong


def test_every_package_has_its_place() -> None:
    assert {package(path) for path in modules() if len(path.relative_to(SOURCE).parts) > 1} == {*BELOW, "cli"}


def of_one_method() -> set[str]:
    """Names that one built-in method alone has: settings, hooks and class attributes beyond those of all methods."""
    classes = [METHODS.find(name) for name in METHODS.own()]
    common = set(dir(Method))
    owners: dict[str, set[type]] = {}
    for kind in classes:
        for name in set(dir(kind)) - common:
            defined = next(each for each in kind.__mro__ if name in vars(each) or name in each.__annotations__)
            owners.setdefault(name, set()).add(defined)
    single = set()
    for name, defining in owners.items():
        having = [kind for kind in classes if hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {})]
        if len(having) == 1 and len(defining) == 1 and not name.startswith("_"):
            single.add(name)
    return single


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Everything that a decision depends on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
            for case in node.cases:
                yield from (each for each in ast.walk(case.pattern) if isinstance(each, ast.expr))
        elif isinstance(node, ast.BoolOp | ast.Compare):
            yield node


def method_conditions(tree: ast.AST, names: set[str], fields: set[str]) -> list[str]:
    """Decisions on a method's name, or on what one method alone has."""
    found = []
    for condition in conditions(tree):
        for node in ast.walk(condition):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"line {node.lineno}: {node.value!r}")
            on_method = isinstance(node, ast.Attribute) and "method" in ast.unparse(node.value).lower()
            if on_method and node.attr in fields:  # type: ignore[attr-defined]
                found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def test_nothing_outside_methods_decides_by_the_method() -> None:
    names, fields = set(METHODS.own()), of_one_method()
    assert {"mu", "option", "posterior"} <= fields  # the test would see such a field
    wrong = {
        str(path.relative_to(SOURCE)): found
        for path in modules()
        if package(path) != "methods" and (found := method_conditions(ast.parse(path.read_text()), names, fields))
    }
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "if recipe.method.name == 'scaffold':\n    pass",
        "x = 1 if training.method.mu else 2",
        "match self.method.name:\n    case 'fjord':\n        pass",
        "y = [a for a in b if run.method.option]",
    ],
)
def test_such_a_decision_would_be_seen(code: str) -> None:
    assert method_conditions(ast.parse(code), {"scaffold", "fjord"}, {"mu", "option"})


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}
