"""Beside the reference plugins: nodes that change over, both ways, and rules in iptables with their chains."""

import json
import re
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import NODE4, NODE6, OUTSIDE4, OUTSIDE6, Place

from narthex.linux.links import ip_batch
from narthex.linux.run import run

pytestmark = pytest.mark.kernel
REFERENCE = Path("/usr/lib/cni")


@pytest.fixture
def place(tmp_path):
    with Place(tmp_path) as made:
        yield made


def old(config):
    return {**config, "cniVersion": "1.0.0"}


def pods_rules(place):
    """Rules and chains of single pods in iptables."""
    text = run(["iptables-save", "-t", "nat"], namespace=place.name)
    text += run(["ip6tables-save", "-t", "nat"], namespace=place.name)
    return [line for line in text.splitlines() if re.search(r"CNI-(DN-)?[0-9a-f]{5}", line)]


def test_a_node_changes_over(place):
    """Pods of the reference plugins keep their addresses, and our DEL takes away everything of theirs."""
    place.pod("a")
    config = old(place.bridge())
    result = place.good("ADD", config, "a", programs=REFERENCE)
    ports = old(place.portmap(result, (8080, 80, "tcp")))
    place.good("ADD", ports, "a", programs=REFERENCE)
    assert place.reserved() == ["10.77.0.2", "fd77::2"]
    assert "File exists" in place.bad("ADD", config, "a")["msg"]
    assert "duplicate allocation" in place.bad("ADD", config, "a", plugin="host-local")["msg"]
    assert place.reserved() == ["10.77.0.2", "fd77::2"]
    mine = place.add("b")
    assert [ip["address"] for ip in mine["ips"]] == ["10.77.0.4/24", "fd77::4/64"]
    place.serve("a", 7000)
    assert place.ask("b", "10.77.0.2", 7000) == "a 10.77.0.4"
    place.good("CHECK", {**config, "prevResult": result, "ipMasq": False}, "a")
    place.good("DEL", ports, "a")
    place.good("DEL", config, "a")
    assert place.reserved() == ["10.77.0.4", "fd77::4"]
    assert not [
        line
        for line in run(["iptables-save"], namespace=place.name).splitlines()
        if "CNI-DN-" in line or "10.77.0.2" in line
    ]


def test_a_node_changes_back(place):
    """The reference's host-local reads our reservations, and frees them."""
    place.add("a")
    place.pod("b")
    config = old(place.bridge(ipMasq=False))
    result = place.good("ADD", config, "b", programs=REFERENCE)
    assert [ip["address"] for ip in result["ips"]] == ["10.77.0.3/24", "fd77::3/64"]
    for name in "ab":
        place.good("DEL", config, name, programs=REFERENCE)
    assert place.reserved() == []


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"])
def test_results_are_those_of_the_reference(place, version):
    """In every version: the same keys, addresses and routes; names and hardware addresses are each one's own."""
    config = {**place.bridge(ipMasq=False, isDefaultGateway=True), "cniVersion": version}
    routes = [{"dst": "192.168.0.0/16"}, {"dst": "fd99::/64", "gw": "fd77::9"}]
    config["ipam"] = {**config["ipam"], "routes": routes}
    addresses = {**config, "ipam": {**config["ipam"], "resolvConf": str(place.scratch / "resolv.conf")}}
    (place.scratch / "resolv.conf").write_text("nameserver 192.0.2.53\nsearch a.example b.example\noptions ndots:5\n")
    said = []
    for programs in (REFERENCE, place.programs):
        place.pod("a")
        said.append(place.good("ADD", config, "a", programs=programs))
        place.good("DEL", config, "a", programs=programs)
        said.append(place.good("ADD", addresses, "a", plugin="host-local", programs=programs))
        place.good("DEL", addresses, "a", plugin="host-local", programs=programs)
        place.drop_pod("a")
        ip_batch(place.name, ["link del cni0"])
        for path in (place.networks / "net").iterdir():
            path.unlink()
    theirs, their_addresses, ours, our_addresses = map(comparable, said)
    assert ours == theirs
    assert our_addresses == their_addresses


def comparable(result):
    for one in result.get("interfaces", ()):
        one["mac"] = "mac"
        one["name"] = one["name"][:4]
    return json.loads(json.dumps(result))


def test_iptables_has_the_reference_chains(place):
    """Both make the same rules, and ours go away as a whole."""
    rules = []
    for programs in (REFERENCE, place.programs):
        place.pod("a")
        result = place.good("ADD", old(place.bridge(ipMasqBackend="iptables")), "a", programs=programs)
        ports = old(
            place.portmap(result, (8080, 80, "tcp"), (8053, 53, "udp"), (8081, 81, "tcp", NODE4), backend="iptables")
        )
        place.good("ADD", ports, "a", programs=programs)
        rules.append(
            {line for line in run(["iptables-save", "-t", "nat"], namespace=place.name).splitlines() if line[0] == "-"}
        )
        if programs == place.programs:
            place.serve("a", 80)
            place.good("CHECK", {**ports}, "a")
            assert place.ask(place.outside, NODE4, 8080) == f"a {OUTSIDE4}"
            assert place.ask(place.outside, NODE6, 8080) == f"a {OUTSIDE6}"
            assert place.ask("", "127.0.0.1", 8080) == "a 10.77.0.1"
            assert place.ask("a", NODE4, 8080) == "a 10.77.0.1"
            other = place.add("b")
            said = place.bad("ADD", old(place.portmap(other, (8080, 80, "tcp"), backend="iptables")), "b")
            assert "tcp 8080 is taken by container a" in said["msg"]
        place.good("DEL", ports, "a", programs=programs)
        place.good("DEL", old(place.bridge()), "a", programs=programs)
        place.drop_pod("a")
        for path in (place.networks / "net").glob("last*"):
            path.unlink()
        assert pods_rules(place) == []
    assert rules[1] == rules[0]
