"""Who may import whom. Each rule has its reason, printed when it breaks."""

import ast
import functools
import itertools
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "narthex"
MODULES = sorted(SRC.rglob("*.py"))

PURE = ("model", "state", "plan", "netfilter", "trace", "backends", "cni", "overlay", "dns", "lb", "lab")
PURE_MODULES = tuple(f"sources/kube/{name}.py" for name in ("holdings", "messages", "pace", "resources", "watch"))
"""Besides these rooms: a protocol is tested without a network, and in made-up time."""
EFFECTS = {
    "os",
    "socket",
    "_socket",
    "subprocess",
    "asyncio",
    "threading",
    "time",
    "random",
    "ctypes",
    "pathlib",
    "shutil",
}
EFFECTS_REASON = (
    "the core takes values and gives values, so that every decision can be tested without a machine; "
    "put the effect into sources/ or host/ and pass its result in"
)

LEVELS = {
    "model": 0,
    "state": 1,
    "plan": 2,
    "netfilter": 2,
    "trace": 3,
    "backends": 4,
    "cni": 4,
    "overlay": 4,
    "dns": 4,
    "lb": 4,
    "lab": 4,
    "sources": 5,
    "host": 5,
    "testing": 6,
    "apps": 7,
    "cli": 8,
    "__main__": 9,
    "__init__": 0,
}
WORKS = ("backends", "cni", "overlay", "dns", "lb", "lab")
"""Works of a node, each of which is there without the others."""
SIBLINGS = [("plan", "netfilter"), *itertools.combinations(WORKS, 2), ("sources", "host")]
SIBLING_REASONS = {
    ("plan", "netfilter"): "a plan speaks Service; rules are below it and must not be needed to decide",
    **dict.fromkeys(
        itertools.combinations(WORKS, 2),
        "a Service's rules, a pod's network, routes between nodes, names and announcements are each there without the "
        "others, and the lab only uses them; what two of them share belongs below both, what joins them into apps/",
    ),
    ("sources", "host"): "what comes in and what goes out meet in apps/ only",
}
ALLOWED = {
    ("sources", "plan"): "configuration is turned into the planner's NodeConfig",
}
ADD_ONS = {
    f"{module}.{name}" for module in ("socket", "_socket") for name in ("inet_pton", "inet_ntop", "AF_INET", "AF_INET6")
}


def room(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def is_pure(path: Path) -> bool:
    return room(path) in PURE or path.relative_to(SRC).as_posix() in PURE_MODULES


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


@pytest.mark.parametrize("here", ROOMS)
def test_imports_go_downwards(here):
    assert here in LEVELS, f"{here}: a new room needs its level here and its place in ARCHITECTURE.md"
    wrong = [reason for path in MODULES if room(path) == here for reason in upwards(path, here)]
    assert not wrong, "\n".join(wrong)


def upwards(path: Path, here: str):
    """What a module imports that it may not, with the reason."""
    for name in imports(path):
        there = name.split(".")[1] if name.startswith("narthex.") else ""
        if there not in LEVELS:
            continue
        if LEVELS[there] > LEVELS[here]:
            yield f"{path}: {here}/ may not import {name}: data flows from model/ to cli/"
        yield from (f"{path}: {name}: {SIBLING_REASONS[pair]}" for pair in SIBLINGS if {here, there} == set(pair))


@pytest.mark.parametrize(
    "here", [name for name in ROOMS if any(is_pure(path) for path in MODULES if room(path) == name)]
)
def test_the_core_has_no_effects(here):
    wrong = [
        f"{path} imports {name}"
        for path in MODULES
        if room(path) == here and is_pure(path)
        for name in imports(path)
        if name not in ADD_ONS and name.split(".")[0] in EFFECTS
    ]
    assert not wrong, "\n".join([*wrong, EFFECTS_REASON])


def test_only_host_run_waits_for_programs():
    """One place starts programs and waits, so that quoting, namespaces and errors are handled once."""
    for path in MODULES:
        if path.name == "run.py" or room(path) in ("apps", "testing") or "subprocess" not in path.read_text():
            continue
        assert not any(name.split(".")[0] == "subprocess" for name in imports(path)), f"{path}: use host.run"


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
