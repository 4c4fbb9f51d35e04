"""`--version` names what a bug report needs: the program, Python, the kernel, and the tools."""

import platform
import re

import pytest
from click.testing import CliRunner

import narthex
from narthex.cli import main
from narthex.cli.version import TOOLS


def lines(*argv):
    done = CliRunner().invoke(main, argv, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "command", [(), ("proxy",), ("node",), ("overlay",)], ids=lambda command: " ".join(command) or "narthex"
)
def test_versions_of_the_program_the_kernel_and_the_tools(command):
    first, python, kernel, *tools = lines(*command, "--version")
    assert first == f"narthex, version {narthex.__version__}"
    assert python == f"Python {platform.python_version()}"
    assert kernel == f"{platform.system()} {platform.release()} {platform.machine()}"
    assert [line.split()[0] for line in tools] == list(TOOLS)
    assert all(re.fullmatch(r"\w+ \d+\.\d+\S*( \((nf_tables|legacy)\))?", line) for line in tools), tools


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that stand for the tools, in a PATH of their own."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return write


def test_a_missing_a_refused_and_a_strange_tool(programs):
    programs("iptables", "echo 'iptables v1.8.7 (legacy)'")
    programs(
        "ipset", "echo 'ipset v7.17, protocol version: 7'; echo 'ipset v7.17: Operation not permitted' >&2; exit 1"
    )
    programs("conntrack", "echo hello")
    assert lines("--version")[3:] == [
        "nft not found",
        "iptables 1.8.7 (legacy)",
        "ipset 7.17",
        "conntrack of unknown version",
    ]
