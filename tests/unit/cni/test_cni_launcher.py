"""The launcher is started for every pod: what it loads is counted."""

import ast
import subprocess
import sys
from pathlib import Path

from narthex.apps.cni import launcher
from narthex.apps.cni.install import install, program

SOURCE = Path(launcher.__file__)
PARTS_IN_C = {"_socket", "gc", "posix", "sys"}


def test_the_launcher_loads_only_what_is_in_c():
    tree = ast.parse(SOURCE.read_text())
    found = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert found == PARTS_IN_C
    assert not [node for node in tree.body if isinstance(node, ast.ImportFrom)]


def test_without_an_agent_nothing_heavy_is_loaded(tmp_path):
    """Each of these takes as long to load as the whole request may."""
    install(tmp_path, None, socket=str(tmp_path / "none"), state=str(tmp_path / "state"), subnet="")
    program = (
        "import sys, runpy, posix\n"
        "posix._exit = lambda status: sys.exit(status)\n"
        f"sys.argv = ['{tmp_path}/bridge']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print(sorted(sys.modules), file=sys.stderr)\n"
    )
    (tmp_path / "empty").write_text("")
    empty = str(tmp_path / "empty")
    # runpy itself loads some; what the plugin loads is loaded behind it.
    plain = subprocess.run(
        [
            sys.executable,
            "-ISE",
            "-c",
            f"import runpy, sys; runpy.run_path({empty!r}); print(sorted(sys.modules), file=sys.stderr)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    environment = {"CNI_COMMAND": "STATUS"}
    stdin = '{"cniVersion":"1.1.0","name":"n","ipam":{"type":"host-local","subnet":"10.0.0.0/24"}}'
    done = subprocess.run(
        [sys.executable, "-ISE", "-c", program],
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ast.literal_eval(done.stderr)) - set(ast.literal_eval(plain.stderr))
    assert "narthex.apps.cni.run" in loaded, done.stderr
    heavy = {
        "json",
        "re",
        "typing",
        "socket",
        "ctypes",
        "enum",
        "pathlib",
        "dataclasses",
        "msgspec",
        "threading",
        "logging",
    }
    assert not loaded & heavy


def test_what_the_installation_writes_is_a_program():
    text = program("/run/it's.sock", '/var/"lib"')
    values = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.List):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            values[target.id] = ast.literal_eval(node.value)
    assert values["SOCKET"] == "/run/it's.sock" and values["STATE"] == '/var/"lib"'
    assert str(SOURCE.parents[3]) in values["PATHS"]
    assert text.startswith(f"#!{sys.executable} -ISE\n")
