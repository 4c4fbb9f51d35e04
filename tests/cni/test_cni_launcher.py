"""The launcher is started for every pod: what it loads is counted."""

import ast
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.cni.program import install as install_module
from narthex.cni.program import launcher
from narthex.cni.program.install import BUNDLE, BUNDLED, LAUNCHER, install, launcher_text, program
from narthex.cni.program.run import COMMAND_HANDLERS

SOURCE = Path(launcher.__file__)
PARTS_IN_C = {"_socket", "gc", "posix", "sys"}


def test_the_launcher_loads_only_what_is_in_c():
    tree = ast.parse(SOURCE.read_text())
    found = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert found == PARTS_IN_C
    assert not [node for node in tree.body if isinstance(node, ast.ImportFrom)]


def test_without_an_agent_nothing_heavy_is_loaded(tmp_path):
    """Each of these takes as long to load as the whole request may."""
    install(tmp_path, None, socket=str(tmp_path / "none"), state=str(tmp_path / "state"))
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
    assert "narthex.cni.program.run" in loaded, done.stderr
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
    text = launcher_text("/run/it's.sock", '/var/"lib"', "/bin/x y")
    values = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.List):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            values[target.id] = ast.literal_eval(node.value)
    assert values["SOCKET"] == "/run/it's.sock" and values["STATE"] == '/var/"lib"'
    assert values["BUNDLE"] == "/bin/x y"
    assert str(SOURCE.parents[3]) in values["PATHS"]
    stub = program("/bin/it's")
    assert stub.startswith(f"#!{sys.executable} -ISE\n")
    (value,) = [
        node.value for node in ast.parse(stub).body if isinstance(node, ast.Assign) and node.targets[0].id == "LAUNCHER"
    ]
    assert ast.literal_eval(value) == "/bin/it's"


def version_of(directory, plugin="bridge"):
    """Status and answer to VERSION, and what was loaded out of the bundle and what out of files."""
    program = (
        "import sys, runpy, posix\n"
        "posix._exit = lambda status: sys.exit(status)\n"
        f"sys.argv = ['{directory}/{plugin}']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: status = end.code\n"
        "loaded = {n: hasattr(m, '__file__') for n, m in sys.modules.items() if n.startswith('narthex')}\n"
        "print(repr((status, loaded)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-ISE", "-c", program],
        env={"CNI_COMMAND": "VERSION"},
        capture_output=True,
        text=True,
        check=True,
    )
    status, loaded = ast.literal_eval(done.stderr)
    return status, json.loads(done.stdout), loaded


def test_the_code_comes_in_one_piece(tmp_path):
    install(tmp_path, None, socket=str(tmp_path / "none"), state=str(tmp_path / "state"))
    status, said, loaded = version_of(tmp_path)
    assert status == 0 and "1.1.0" in said["supportedVersions"]
    assert loaded and not any(loaded.values())


@pytest.mark.parametrize("what", ["foreign", "gone", "cut"])
def test_without_a_bundle_of_this_python_the_files_do(tmp_path, what):
    install(tmp_path, None, socket=str(tmp_path / "none"), state=str(tmp_path / "state"))
    for name in (BUNDLE, LAUNCHER):
        file = tmp_path / name
        if what == "foreign":
            file.write_bytes(b"\0\0\0\0" + file.read_bytes()[4:])
        elif what == "cut" and name == BUNDLE:
            file.write_bytes(file.read_bytes()[:1000])
        elif what == "gone":
            file.unlink()
    status, said, loaded = version_of(tmp_path)
    assert status == 0 and "1.1.0" in said["supportedVersions"]
    assert loaded and all(loaded.values())


def test_a_program_whose_launcher_is_gone_says_so(tmp_path):
    install(tmp_path, None, socket=str(tmp_path / "none"), state=str(tmp_path / "state"))
    for name in (LAUNCHER, f"{LAUNCHER}.py"):
        (tmp_path / name).unlink()
    status, said, _ = version_of(tmp_path)
    assert status == 1 and said["code"] == 999 and said["details"] == "narthex cni install"


def test_the_bundle_holds_all_of_the_plugins():
    """What the modules import, wherever in them, from the first on."""
    root = SOURCE.parents[3]
    seen, waiting = set(), ["narthex.cni.program.run"]
    waiting += [f"narthex.cni.program.{module}" for module, _ in COMMAND_HANDLERS.values()]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = root / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        waiting += [name.rpartition(".")[0]] if "." in name else []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("narthex"):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                waiting += (
                    [each for each in inner if importlib.util.find_spec(each)] if is_package(root, node.module) else []
                )
                waiting.append(node.module)
    # What forgets UDP flows needs much more; that comes from files.
    ours = {name for name in seen if name.split(".")[1:2] == ["cni"] or name.split(".")[2:3] == ["cni"]}
    assert ours <= set(BUNDLED) <= seen


def is_package(root, name):
    return (root / name.replace(".", "/")).is_dir()


def test_what_the_plugins_load_at_once_is_in_the_bundle():
    modules = sorted({f"narthex.cni.program.{module}" for module, _ in COMMAND_HANDLERS.values()})
    text = f"import sys, {', '.join(modules)}; print(*(name for name in sys.modules if name.startswith('narthex')))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= set(BUNDLED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"plugins": [', "the network configuration cannot be read"),
        ("{}", "name"),
        ('{"name": "n", "plugins": []}', "plugins: must be a list with one plugin or more"),
        ('{"name": "n", "plugins": [{}]}', "plugins[0].type: must name a plugin"),
    ],
)
def test_a_configuration_that_no_runtime_could_read_is_not_installed(tmp_path, text, said):
    file, networks = tmp_path / "given.conflist", tmp_path / "net.d"
    file.write_text(text)
    words = [
        "cni",
        "install",
        "--bin-dir",
        str(tmp_path / "bin"),
        "--conf-dir",
        str(networks),
        "--conf-file",
        str(file),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert str(file) in done.output and said in done.output
    assert not networks.exists() and not (tmp_path / "bin").exists()


def test_self_contained_plugins_bring_their_python_along(tmp_path):
    """They start a shell and a copy of the interpreter, and of another installation they leave nothing."""
    place = {"socket": str(tmp_path / "none"), "state": str(tmp_path / "state"), "subnets": ()}
    directory, networks = tmp_path / "the plugins' programs", tmp_path / "net.d"
    text = b'{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "flannel"}]}\n'
    (directory / install_module.PYTHONS / "older").mkdir(parents=True)
    install(directory, networks, **place, self_contained=True, configuration=text)
    (python,) = [each for each in (directory / install_module.PYTHONS).iterdir() if each.is_dir()]
    words = shlex.split((directory / "bridge").read_text(), comments=False)
    assert words[:3] == ["#!/bin/sh", "exec", words[2]]
    used = {word for word in words if word.startswith(str(tmp_path))}
    assert all(Path(word).is_relative_to(directory) for word in used) and f"{python}/bin/python3" in used
    done = subprocess.run(
        [directory / "bridge"], env={"CNI_COMMAND": "VERSION"}, input=b"{}", capture_output=True, check=True, timeout=60
    )
    assert b'"supportedVersions"' in done.stdout
    written = python.stat().st_mtime_ns
    assert [each.read_bytes() for each in networks.iterdir()] == [text]
    install(directory, networks, **place, self_contained=True, configuration=text.replace(b"n", b"m"))
    assert python.stat().st_mtime_ns == written
    foreign = directory / "dhcp"
    foreign.write_text("#!/bin/sh\n")
    (directory / "ptp").write_text("#!/bin/sh\n")
    install_module.uninstall(directory, networks)
    assert sorted(each.name for each in directory.iterdir()) == ["dhcp", "ptp"]
    assert list(networks.iterdir()) == []
