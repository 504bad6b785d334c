"""The rooms keep to their doors: who imports whom, how large files grow, and that public names are documented."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "extract", "train")
MAY_IMPORT = {"common": {"common"}, "extract": {"common", "extract"}, "train": {"common", "train"}}
MAX_LINES = 350
FILES = [*sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")), ROOT / "cli.py"]
BESIDE = sorted(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


def imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name.startswith("draftcache."))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    found = {other for path in (ROOT / room).rglob("*.py") for other in imported_rooms(path)}
    assert found <= MAY_IMPORT[room]


def test_kernels_know_nothing_of_training() -> None:
    for path in (ROOT / "train" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftcache."):
                assert (node.module or "").startswith("draftcache.train.kernels"), path.name


def test_the_root_holds_only_the_command_line() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"cli.py", "__main__.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small_and_documented(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and node in n.body]
            private = any(isinstance(n, ast.FunctionDef) or n.name.startswith("_") for n in inside)
            assert private or ast.get_docstring(node) or node.name == "convert", f"{node.name} has no docstring"


@pytest.mark.parametrize("path", BESIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_beside_the_rooms_stay_small_too(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def test_the_command_line_starts_without_torch() -> None:
    probe = "import sys, draftcache.cli; print([m for m in ('torch', 'transformers', 'zarr') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_file_has_its_line_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in FILES if path.name != "__init__.py" and f"{path.name} " not in readme]
    assert not missing
