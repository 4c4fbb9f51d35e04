"""Every msgspec type that is decoded has its decoder before the first thread starts: two threads that build one crash."""

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import narthex
from narthex.kube import messages
from narthex.model import wire
from narthex.model.decode.objects import KINDS, shape_of

ROOT = Path(narthex.__file__).parent

BUILT_LATER = {
    ("kube/messages.py", "_reader"): "cached, and called by prepare_decoders for each kind",
    ("kube/messages.py", "prepare_decoders"): "builds the decoders of the shapes of all kinds",
    ("model/decode/objects.py", "_typed"): "the shape of a kind: prepare_decoders",
    ("model/decode/objects.py", "_shaped"): "the shape of a kind: prepare_decoders",
    ("proxy/plan/document.py", "plan_record"): "the command `plan`, which has one thread",
    ("proxy/plan/document.py", "_service"): "the command `plan`, which has one thread",
    ("trace/agents/requests.py", "read_request"): "the server of agents has one thread",
    ("trace/issue/text.py", "_question"): "the commands `trace` and `bundle`, which have one thread",
    ("cli/cleanup.py", None): "a command has one thread",
    ("cli/lab/faults.py", None): "a command has one thread",
    ("testing/build.py", None): "for tests",
    ("testing/scenario.py", None): "for tests",
}
"""Functions that build a decoder, and why that is safe. None: any function of the file."""

PRODUCTS = ("model", "netfilter", "linux", "runtime", "kube", "proxy", "cni", "overlay", "dns", "lb")
ELSEWHERE = {
    "cni/program/runtime.py": "loaded by labs and by commands with one thread",
    "netfilter/nft/json.py": "loaded by explanations, which read dumps of `nft -j`; shares no type with others",
    "kube/exec_plugin.py": "loaded with the first plugin; shares no type with others",
    "lb/why.py": "loaded by labs and explanations: clients of the announcer",
    "proxy/relay/process.py": "loaded with the first relay; shares no type with others",
    "proxy/relay/wire.py": "the same",
}
"""Modules with decoders that a node does not load before its threads start."""


def typed(call):
    """Whether a call builds a decoder of a type, unless that was done before."""
    name = ast.unparse(call.func)
    if name.endswith((".Decoder", "msgspec.convert")) or name in ("Decoder", "convert"):
        return "msgspec" in name or name in ("Decoder", "convert")
    return (
        name.startswith("msgspec.") and name.endswith(".decode") and any(each.arg == "type" for each in call.keywords)
    )


def builders():
    """Yield file and function (None: at import) of each place that builds a decoder."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "msgspec" not in text:
            continue
        stack = [(ast.parse(text), None)]
        while stack:
            node, function = stack.pop()
            for child in ast.iter_child_nodes(node):
                inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
                stack.append((child, inside))
                if isinstance(child, ast.Call) and typed(child):
                    yield str(path.relative_to(ROOT)), function


def test_decoders_are_built_where_their_modules_are_loaded():
    later = {place for place in builders() if place[1] is not None}
    known = {place for place in later if place in BUILT_LATER or (place[0], None) in BUILT_LATER}
    assert later - known == set(), "make the decoder a constant of its module"
    assert len([place for place in builders() if place[1] is None]) >= 20


def test_every_exception_is_needed():
    later = {place for place in builders() if place[1] is not None}
    needed = later | {(file, None) for file, _ in later}
    assert set(BUILT_LATER) - needed == set()


def test_the_shapes_of_all_kinds_are_prepared(monkeypatch):
    built = []
    messages._reader.cache_clear()
    monkeypatch.setattr(messages.msgspec.json, "Decoder", lambda type: built.append(type) or REAL(type))
    messages.prepare_decoders()
    assert {messages.WatchEvent[shape_of(kind)] for kind in KINDS} <= set(built)
    shapes = [each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    assert {each for each in shapes if not getattr(each, "__parameters__", ())} <= set(built)


REAL = msgspec.json.Decoder

NODE = """
import sys, threading, importlib
from narthex.node import process
from narthex.proxy.program import start
loaded = None
def started(thread):
    global loaded
    loaded = set(sys.modules) if loaded is None else loaded
threading.Thread.start = started
for entry in process.PARTS.values():
    for module in entry.modules:
        importlib.import_module(module)
threading.Thread(target=print).start()
print("\\n".join(sorted(loaded)))
"""


def loaded_by(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_with_decoders(folders):
    files = {file for file, function in builders() if function is None and file.split("/")[0] in folders}
    return {file: "narthex." + file.removesuffix(".py").replace("/", ".") for file in files}


def test_a_node_loads_its_decoders_before_its_threads_start():
    found = modules_with_decoders(PRODUCTS)
    assert len(found) >= 8
    loaded = loaded_by(NODE)
    missing = {file for file, module in found.items() if module not in loaded}
    assert missing <= set(ELSEWHERE), "add the module to its part in node/process.py"
    assert set(ELSEWHERE) <= set(found)


def test_a_lab_loads_its_decoders_before_its_threads_start():
    program = (
        "import sys; import narthex.lab.program.daemon, narthex.lab.program.lab_process; print('\\n'.join(sys.modules))"
    )
    loaded = loaded_by(program)
    missing = {file for file, module in modules_with_decoders(["lab"]).items() if module not in loaded}
    # Loaded with the first `exec`; its type is in no other decoder, and a module is loaded by one thread. The others are of
    # `lab conformance`, which loads them before it starts threads, and of no lab.
    conformance = {"lab/conformance.py", "lab/program/conformance/coordinator.py"}
    assert missing <= {"lab/server/exec.py", *conformance}


@pytest.mark.parametrize("module", ["narthex.proxy.program.start", "narthex.lab.program.lab_process"])
def test_programs_prepare_the_shapes(module):
    text = Path(*[ROOT, *module.split(".")[1:]]).with_suffix(".py").read_text()
    assert "    prepare_decoders()\n" in text
