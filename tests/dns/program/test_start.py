"""Settings of the server: flags, places to listen, where objects come from."""

import errno
import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.dns.corefile.parse import parse
from narthex.dns.corefile.settings import Upstream
from narthex.dns.program.configuration import CorefileSource, DnsConfigurationError, DnsFlags
from narthex.dns.program.listeners import ListenAddress, ListenError, listen_addresses, open_sockets, reached_at
from narthex.dns.program.serve import DnsSettings, build_server


def blocks(text):
    return parse(text).blocks


def test_flags_are_a_corefile_as_kubeadm_writes_it():
    (block,) = CorefileSource(None, DnsFlags()).blocks
    assert (block.zones, block.port, block.bind) == ((".",), 53, None)
    assert block.kubernetes.zones == ("cluster.local.", "in-addr.arpa.", "ip6.arpa.")
    assert (block.kubernetes.pods, block.kubernetes.ttl) == ("insecure", 30)
    assert block.forwards == ()
    told = DnsFlags(zones=("corp.example",), listen="[::1]:5300", upstreams=("192.0.2.53",), ttl=5)
    (block,) = CorefileSource(None, told).blocks
    assert (block.port, block.bind.to, block.kubernetes.ttl) == (5300, ("::1",), 5)
    assert block.forwards[0].to == (Upstream("192.0.2.53"),)


@pytest.mark.parametrize(
    "flags",
    [
        DnsFlags(zones=("a b",)),
        DnsFlags(zones=("",)),
        DnsFlags(upstreams=("} evil {",)),
        DnsFlags(listen="x"),
        DnsFlags(listen="127.0.0.1:dns"),
        DnsFlags(zones=("a..b",)),
        DnsFlags(listen="127.0.0.1:99999"),
    ],
)
def test_flags_that_mean_nothing(flags):
    with pytest.raises(DnsConfigurationError):
        CorefileSource(None, flags)


def test_places():
    found = listen_addresses(
        blocks(
            ". {\n bind 127.0.0.1 lo\n forward . 192.0.2.1\n}\n"
            "a.example {\n forward . 192.0.2.1\n}\nb.example:54 c.example {\n bind 127.0.0.1\n forward . 192.0.2.1\n}\n"
        )
    )
    by_place = {(place.address, place.port): place.blocks for place in found}
    assert by_place["127.0.0.1", 53] == (0, 3)
    assert by_place["0.0.0.0", 53] == by_place["::", 53] == (1,)
    assert by_place["127.0.0.1", 54] == (2,)
    assert reached_at(found)[:1] == ("127.0.0.1",)


def test_a_bind_that_is_nowhere():
    with pytest.raises(ListenError, match="neither an address nor a link"):
        listen_addresses(blocks(". {\n bind nosuchlink\n forward . 192.0.2.1\n}\n"))


def test_a_port_that_needs_a_right_names_it(monkeypatch):
    def refuse(*_words):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ListenError, match=r"UDP 127\.0\.0\.1 port 53; this port needs root, CAP_NET_BIND_SERVICE"):
        open_sockets(ListenAddress("127.0.0.1", 53, (0,), "dns"))


def test_where_objects_come_from(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    cluster = blocks(".:5300 {\n kubernetes cluster.local\n}\n")
    with pytest.raises(DnsConfigurationError, match="nothing to follow"):
        build_server(DnsSettings(blocks=cluster), None, "", "")
    build_server(DnsSettings(blocks=cluster), None, "", "http://127.0.0.1:1")
    build_server(DnsSettings(blocks=blocks(".:5300 {\n forward . 192.0.2.1\n}\n")), None, "", "")
    two = blocks(
        ".:5300 {\n kubernetes a.example {\n kubeconfig /one\n }\n}\n.:5301 {\n kubernetes b.example {\n kubeconfig /two\n }\n}\n"
    )
    with pytest.raises(DnsConfigurationError, match="one API server"):
        build_server(DnsSettings(blocks=two), None, "", "")


def test_workers():
    assert DnsSettings(blocks=(), workers=3).number == 3
    assert 1 <= DnsSettings(blocks=()).number <= 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--zone", "a", "--conf", "x"], "give --conf alone"),
        (
            ["--conf", "/nonexistent/Corefile"],
            "Error: /nonexistent/Corefile: cannot be read: No such file or directory\n",
        ),
        (["--listen", "x:y", "--check"], "--listen"),
        (["--check"], "the flags: 1 server block, nothing is wrong\n"),
        (["-o", "json"], "-o requires --check"),
    ],
)
def test_the_command(arguments, said):
    assert said in CliRunner().invoke(main, ["dns", *arguments]).output


KUBEADM = Path(__file__).parents[3] / "examples" / "dns" / "Corefile"


def test_a_check_as_data(tmp_path):
    def checked(path):
        done = CliRunner().invoke(main, ["dns", "--conf", str(path), "--check", "-o", "json"])
        found = json.loads(done.stdout)
        assert done.exit_code == (0 if found["usable"] else 1)
        return found

    assert checked(KUBEADM) == {"usable": True, "servers": [{"zones": ["."], "port": 53}], "problems": []}
    faulty = tmp_path / "Corefile"
    faulty.write_text(".:53 {\n    debug\n    no\x1bne\n    dnssec\n}\n")
    found = checked(faulty)
    assert (found["usable"], found["servers"]) == (False, [])
    assert [(each["origin"], each["severity"]) for each in found["problems"]] == [
        (f"{faulty}:2", "warning"),
        (f"{faulty}:3", "error"),
        (f"{faulty}:4", "error"),
    ]
    assert "\\x1b" in found["problems"][1]["message"]
    faulty.write_text(".:53 .:54 {\n    debug\n}\n")
    found = checked(faulty)
    assert [(each["zones"], each["port"]) for each in found["servers"]] == [(["."], 53), (["."], 54)]
    assert {each["severity"] for each in found["problems"]} == {"warning"}
    (fault,) = checked(tmp_path / "nowhere")["problems"]
    assert fault["message"] == f"{tmp_path}/nowhere: cannot be read: No such file or directory"


def test_a_file_that_can_be_used_with_warnings(tmp_path):
    path = tmp_path / "Corefile"
    path.write_text(".:53 .:54 {\n    debug\n}\n")
    done = CliRunner().invoke(main, ["dns", "--conf", str(path), "--check"])
    assert done.stdout == f"{path}: 2 server blocks, usable with the warnings above\n"
    assert "debug: has no effect" in done.stderr
