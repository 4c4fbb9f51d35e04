"""Bundles of a real namespace: ours and the shell script's hold the same, and can be followed."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.trace.node.layout import SOCKETS_FILE, TAKEN, script
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.bundle import gather, read_bundle, write_file

pytestmark = pytest.mark.kernel

NODE = f"nxbk{os.getpid()}"


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    create_namespace(NODE)
    try:
        for words in (
            "link add cni0 type bridge",
            "link set cni0 up",
            "addr add 10.244.7.1/24 dev cni0",
            "link add vx.1 type vxlan id 1 dstport 8472 local 10.244.7.1 nolearning dev cni0",
            "link set vx.1 up",
            "route add 10.244.8.0/24 via 10.244.8.0 dev vx.1 onlink",
            "neigh add 10.244.8.0 lladdr 02:00:00:00:00:08 dev vx.1 nud permanent",
            "rule add pref 100 fwmark 0x10/0x10 lookup 77",
        ):
            run(["ip", *words.split()], namespace=NODE)
        run(["bridge", "fdb", "add", "02:00:00:00:00:08", "dev", "vx.1", "dst", "10.0.0.8"], namespace=NODE)
        rules = "*nat\n-A PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.8.7:80\nCOMMIT\n"
        run(["iptables-restore"], stdin=rules, namespace=NODE)
        yield NODE
    finally:
        delete_namespace(NODE)


def test_the_script_takes_what_the_command_takes(node: str, tmp_path: Path) -> None:
    ours = gather("node-1", node)
    write_file(tmp_path / "ours.tgz", ours.table, ours.parts)
    with in_namespace(node), (tmp_path / "theirs.tgz").open("wb") as out:
        done = subprocess.run(
            ["sh"], input=script().encode(), stdout=out, stderr=subprocess.PIPE, timeout=120, check=True
        )
    one, other = read_bundle(tmp_path / "ours.tgz"), read_bundle(tmp_path / "theirs.tgz")
    # The script cannot know whether maps that are pinned on this machine are those of its own network namespace.
    statuses = [
        {part.path: part.status for part in bundle.table.parts if part.path != SOCKETS_FILE} for bundle in (one, other)
    ]
    assert statuses[0] == statuses[1]
    named = [line.split(": ")[1] for line in done.stderr.decode().splitlines()]
    assert named == [part.path for part in other.table.parts if part.status != TAKEN]
    assert SOCKETS_FILE in {part.path for part in other.table.parts} and SOCKETS_FILE not in other.parts
    assert one.parts.keys() == other.parts.keys()
    for path in one.parts:
        if path.startswith("net/") or path == "rules/nft.txt":
            lines = [
                sorted(each for each in bundle.parts[path].split("\n") if "conntrack_count" not in each)
                for bundle in (one, other)
            ]
            assert lines[0] == lines[1] or "conntrack" in path or "links" in path, path


def test_what_the_kernel_has_comes_out_of_a_bundle(node: str, tmp_path: Path) -> None:
    gathered = gather("node-1", node)
    write_file(tmp_path / "b.tgz", gathered.table, gathered.parts)
    read = read_bundle(tmp_path / "b.tgz")
    view = view_of_bundle(read.parts, read.table, "b.tgz")
    assert view.name == "node-1"
    assert view.absent == {}
    vxlan = view.link("vx.1")
    assert vxlan is not None
    assert (vxlan.kind, vxlan.vxlan_id, vxlan.vxlan_local, vxlan.vxlan_port) == ("vxlan", 1, "10.244.7.1", 8472)
    assert view.sysctl("net.ipv4.conf.vx/1.rp_filter") is not None
    assert [rule.mark for rule in view.policies or () if rule.priority == 100] == [16]
    assert any(entry.remote == "10.0.0.8" for entry in view.fdb or ())
    assert any(each.mac == "02:00:00:00:00:08" for each in view.neighbours or ())


def test_no_secret_among_the_settings(node: str) -> None:
    with in_namespace(node):
        Path("/proc/sys/net/ipv6/conf/cni0/stable_secret").write_text("2001:db8::5ec:1234")
    gathered = gather("node-1", node)
    assert "stable_secret" not in gathered.parts["net/sysctls.txt"]
    assert all("5ec:1234" not in text for text in gathered.parts.values())


def test_a_tool_that_fails_is_written_down(node: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body in (("ip", "echo 'Object is unknown' >&2; exit 3"), ("uname", 'exec /bin/uname "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gathered = gather("node-1", node)
    told = {part.path: (part.status, part.remark) for part in gathered.table.parts}
    assert told["net/links.json"] == ("failed", "Object is unknown")
    assert told["rules/nft.txt"] == ("absent", "nft is not installed")
    assert told["about/kernel.txt"][0] == TAKEN
    view = view_of_bundle(gathered.parts, gathered.table, "live")
    assert view.absent["routes"] == "Object is unknown"
    assert view.rules is None
