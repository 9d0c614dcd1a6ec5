"""The direction of import: a room may import only what is below it, and ``_`` programs import nothing of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import envbuilder

PACKAGE = Path(envbuilder.__file__).parent
LEAVES = {"errors", "report", "run", "parallel", "memory", "tomlread", "tomlwrite", "http", "atomic", "__init__"}
#: Room -> the rooms it may import, besides the leaves and itself.
ALLOWED = {
    "oci": set(),
    "spec": set(),
    "store": {"oci"},
    "registry": {"oci"},
    "lock": {"spec", "oci.digest"},
    "wheels": {"spec", "lock", "oci", "store"},
    "system": {"spec", "lock.drift", "oci", "store"},
    "images": {"spec", "lock", "oci", "store", "registry", "wheels", "system"},
    "launch": {"spec", "oci", "store"},
    "cli": {"spec", "lock", "oci", "store", "registry", "wheels", "system", "images", "launch"},
}
#: Leaf -> the leaves it may import.
LEAF_ORDER = ["__init__", "errors", "report", "parallel", "memory", "run", "atomic", "tomlread", "tomlwrite", "http"]
STANDALONE = {"wheels/_compile.py"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the dotted names below ``envbuilder`` that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("envbuilder.") for name in names if name.startswith("envbuilder.")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_what_is_below(path: Path):
    relative = path.relative_to(PACKAGE)
    used = imported(path)
    if str(relative) in STANDALONE:
        assert not used
        return
    if relative.name == "__main__.py":
        assert used == {"cli.main.entry"}
        return
    if len(relative.parts) == 1:
        below = LEAF_ORDER[: LEAF_ORDER.index(path.stem)]
        assert {name.split(".")[0] for name in used} <= {*below, "__version__"}
        return
    room = relative.parts[0]
    for name in used:
        top = name.split(".")[0]
        fine = top in {*LEAVES, room, "__version__"}
        assert fine or any(name == a or name.startswith(f"{a}.") for a in ALLOWED[room]), f"{relative} imports {name}"


def test_every_room_is_known():
    rooms = {p.relative_to(PACKAGE).parts[0] for p in modules() if len(p.relative_to(PACKAGE).parts) > 1}
    assert rooms <= set(ALLOWED)


def test_prints_only_in_cli():
    for path in modules():
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        if any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls):
            assert path.relative_to(PACKAGE).parts[0] == "cli", path


def test_rich_only_in_the_console():
    users = {str(p.relative_to(PACKAGE)) for p in modules() if "rich" in p.read_text() and "import" in p.read_text()}
    found = {
        u
        for u in users
        if any(line.startswith(("import rich", "from rich")) for line in (PACKAGE / u).read_text().splitlines())
    }
    assert found <= {"cli/console.py"}
