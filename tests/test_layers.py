"""Rules on the source that no linter checks. Each has its reason, printed when it breaks."""

import ast
import functools
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "narthex"
MODULES = sorted(SRC.rglob("*.py"))


def room(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


ROOMS = sorted({room(path) for path in MODULES})


@functools.cache
def tree(path: Path):
    """A module's syntax tree: reading hundreds of them once is enough."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path):
    """All nodes of that tree that these tests ask for."""
    kept = (ast.Import, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(tree(path)) if isinstance(node, kept)]


def imports(path: Path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, so that a reader sees where they go"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def test_only_linux_run_waits_for_programs():
    """One place starts programs and waits, so that quoting, namespaces and errors are handled once.

    The other, `supervised`, runs programs of others that must not outlive this process.
    """
    for path in MODULES:
        allowed = (
            path.name in ("run.py", "supervised.py")
            or room(path) == "testing"
            or "program" in path.parts
            or "ui" in path.parts
        )
        if allowed or "subprocess" not in path.read_text():
            continue
        assert not any(name.split(".")[0] == "subprocess" for name in imports(path)), f"{path}: use linux.run"


@pytest.mark.row("1.17")
def test_nobody_opens_an_sctp_socket():
    """That would load the kernel's module sctp, which Services with SCTP do not need."""
    for path in MODULES:
        if "IPPROTO_SCTP" not in path.read_text():
            continue
        names = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        assert "IPPROTO_SCTP" not in names | set(imports(path)), f"{path}: netfilter needs no socket for SCTP"


@pytest.mark.parametrize("here", ROOMS)
def test_modules_say_what_they_are(here):
    silent = [str(path) for path in MODULES if room(path) == here and not ast.get_docstring(tree(path))]
    assert not silent, "\n".join([*silent, "begin with a docstring that says what the module knows"])
