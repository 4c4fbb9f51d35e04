"""What people paste around and between rules: prompts, prefixes, colors, remarks, line ends, other tools, and unusable files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.trace.test_partial_input import BOTH, FILTER, NAT, ends

from narthex.cli import main
from narthex.model import Snapshot
from narthex.trace.model import Fate, PacketPath
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

SAVE = NAT + FILTER


def traced(*texts: str, to: str = "10.96.0.20:80", own: tuple[str, ...] = ("192.168.1.11",)) -> PacketPath:
    files = [(f"{number}.txt", text) for number, text in enumerate(texts)]
    known = KnownCluster(views=(view_of_files(files),), snapshot=Snapshot(), node_ips=own)
    return travel(known, TraceRequest(source="198.51.100.7", destination=to, iif="eth0"))


def each_line(change: Callable[[str], str]) -> str:
    return "".join(change(line) + "\n" for line in SAVE.splitlines())


HALF = "".join(NAT.splitlines(keepends=True)[:24])
PASTED = {
    "as it is": SAVE,
    "Windows line ends": SAVE.replace("\n", "\r\n"),
    "a byte order mark": "\ufeff" + SAVE,
    "colors of grep": each_line(
        lambda line: line.replace("KUBE-SERVICES", "\x1b[01;31m\x1b[KKUBE-SERVICES\x1b[m\x1b[K")
    ),
    "colors of a terminal": "\x1b[?2004h\x1b[01;32mubuntu@node-1\x1b[00m:\x1b[01;34m~\x1b[00m$ sudo iptables-save\x1b[?2004l\n"
    + SAVE,
    "a prompt with a password": "user@node:~$ sudo iptables-save\n[sudo] password for user: \n"
    + SAVE
    + "user@node:~$ \n",
    "kubectl exec": '$ kubectl -n kube-system exec -it kube-proxy-abcde -- iptables-save\nDefaulted container "kube-proxy" out of: kube-proxy, init (init)\n'
    + SAVE,
    "kubectl debug": "kubectl debug node/worker-1 -it --image=nicolaka/netshoot\nCreating debugging pod node-debugger-worker-1-x2x4z with container debugger on node worker-1.\nIf you don't see a command prompt, try pressing enter.\nworker-1:~# iptables-save\n"
    + SAVE,
    "docker exec": "❯ docker exec kind-worker iptables-save\n" + SAVE,
    "crictl and nsenter": "# nsenter -t $(pidof kubelet) -n iptables-save\n" + SAVE,
    "ssh": "PS C:\\Users\\me> ssh core@10.0.0.4 sudo iptables-save\r\n" + SAVE.replace("\n", "\r\n"),
    "indented": textwrap.indent(SAVE, "    "),
    "a list in Markdown": "1. Output:\n\n   ```console\n" + textwrap.indent(SAVE, "   ") + "   ```\n",
    "HTML details": "<details><summary>iptables-save</summary>\n<pre>\n" + SAVE + "</pre>\n</details>\n",
    "quoted in a mail": each_line(lambda line: f"> {line}"),
    "prefixes of kubectl logs": each_line(lambda line: f"[pod/dump-x7k2p/dump] {line}"),
    "timestamps of kubectl logs": each_line(lambda line: f"2026-03-02T10:11:12.123456789Z {line}"),
    "journald": each_line(lambda line: f"Mar 02 10:11:12 worker-1 dump.sh[812]: {line}"),
    "remarks behind rules": each_line(
        lambda line: line + "   # <-- this one?" if line.startswith("-A KUBE-SVC") else line
    ),
    "remarks between rules": SAVE.replace("-A KUBE-SEP-A", "# now the endpoint\n-A KUBE-SEP-A", 1),
    "trailing blanks": each_line(lambda line: line + "   \t"),
    "blank lines": each_line(lambda line: line + "\n"),
    "half of a table twice": SAVE + "# again:\n" + SAVE,
    "a half and then the whole": HALF + "^C\nroot@node:~# iptables-save\n" + SAVE,
    "line numbers of cat": "".join(
        f"{number:6}\t{line}" for number, line in enumerate(SAVE.splitlines(keepends=True), 1)
    ),
    "line numbers of grep": "".join(
        f"{number}:{line}" for number, line in enumerate(SAVE.splitlines(keepends=True), 1)
    ),
    "counters": each_line(lambda line: f"[12:720] {line}" if line.startswith("-A") else line),
    "a warning": "# Warning: iptables-legacy tables present, use iptables-legacy-save to see them\n" + SAVE,
    "non-breaking spaces": each_line(lambda line: line.replace(" -j ", "\u00a0-j\u00a0")),
    "typographic dashes and quotes": SAVE.replace('"kubernetes service portals"', "“kubernetes service portals”"),
}


@pytest.mark.parametrize("name", PASTED)
def test_what_stands_around_rules_changes_no_answer(name: str) -> None:
    path = traced(PASTED[name])
    assert ends(path) == BOTH, [leaf.end for leaf in path.leaves()]


IPVSADM = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn
TCP  10.96.0.20:80 rr
  -> 10.244.1.5:8080              Masq    1      0          0
  -> 10.244.2.6:8080              Masq    1      0          0
"""
NFT = """\
map service-ips {
    type ipv4_addr . inet_proto . inet_service : verdict
    elements = { 10.96.0.20 . tcp . 80 : goto service-AAAAAAAA-shop/web/tcp/http }
}
chain service-AAAAAAAA-shop/web/tcp/http {
    meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.244.1.5 . 8080, 1 : 10.244.2.6 . 8080 }
}
"""
LINKS = """\
1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT group default qlen 1000
    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
2: eth0@if7: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP mode DEFAULT group default
    link/ether 02:42:ac:12:00:02 brd ff:ff:ff:ff:ff:ff link-netnsid 0
"""
ADDRESSES = """\
1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN group default qlen 1000
    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
    inet 127.0.0.1/8 scope host lo
       valid_lft forever preferred_lft forever
2: eth0@if7: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP group default
    link/ether 02:42:ac:12:00:02 brd ff:ff:ff:ff:ff:ff link-netnsid 0
    inet 192.168.1.11/24 brd 192.168.1.255 scope global eth0
       valid_lft forever preferred_lft forever
"""


def destinations(path: PacketPath) -> dict[str, float]:
    """Return the endpoints of a path, and of those that are possible."""
    found = {leaf.end.address: float(leaf.probability) for leaf in path.leaves() if leaf.end.address}
    return found | {end.address: 0.0 for leaf in path.leaves() for end in leaf.end.may if end.address not in found}


@pytest.mark.parametrize(
    "text", [IPVSADM, IPVSADM + "\n" + IPVSADM, "# ipvsadm -ln\n" + IPVSADM + "# ipvsadm -ln\n" + IPVSADM]
)
def test_servers_that_are_printed_twice_count_once(text: str) -> None:
    assert destinations(traced(text)) == {"10.244.1.5": 0.5, "10.244.2.6": 0.5}
    assert not any("again" in part.why for part in traced(text).missing)


def test_servers_that_are_printed_with_others_are_said() -> None:
    less = "".join(line for line in IPVSADM.splitlines(keepends=True) if "10.244.2.6" not in line)
    path = traced(IPVSADM + "\n" + less)
    assert destinations(path) == {"10.244.1.5": 0.5, "10.244.2.6": 0.5}
    assert any("again with other real servers; the first listing counts" in part.why for part in path.missing)


def test_chains_and_maps_of_nft_without_their_table() -> None:
    path = traced(NFT)
    assert destinations(path) == {"10.244.1.5": 0.5, "10.244.2.6": 0.5}
    assert all(leaf.end.supposing for leaf in path.leaves())


def test_addresses_and_links_as_ip_prints_them() -> None:
    path = traced(SAVE, ADDRESSES, LINKS, to="192.168.1.11:30080", own=())
    assert ends(path) == BOTH
    together = traced(SAVE + "root@node:~# ip addr\n" + ADDRESSES, to="192.168.1.11:30080", own=())
    assert {leaf.end.fate for leaf in together.leaves()} <= {Fate.LEAVES, Fate.UNKNOWN}


def test_a_file_that_cannot_be_used_is_named_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text(SAVE)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    done = CliRunner().invoke(
        main,
        [
            "trace",
            "--rules",
            str(tmp_path / "rules.txt"),
            "--rules",
            str(tmp_path / "picture.png"),
            "10.244.9.9",
            "10.96.0.20:80",
            "--all",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "to one of 2 endpoints" in done.output and "picture.png" in done.output
