"""CNI plugins on a node of namespaces: what a container runtime sees, with the agent and without it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import NODE4, NODE6, OUTSIDE4, OUTSIDE6, Place

from narthex.cni.program.install import install
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel
ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path):
    with Place(tmp_path) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["alone", "agent"])
def either(request, tmp_path):
    """A node without an agent, and one with."""
    with Place(tmp_path, agent=request.param) as made:
        yield made


def addresses(result):
    return [ip["address"] for ip in result["ips"]]


def test_a_pod_comes_and_goes(either):
    result = either.add("a", (8080, 80, "tcp"))
    assert addresses(result) == ["10.77.0.2/24", "fd77::2/64"]
    assert result["interfaces"][0]["name"] == "cni0"
    assert result["interfaces"][2]["sandbox"] == f"/run/netns/{either.name}a"
    assert result["ips"][0]["interface"] == 2
    either.serve("", 7000)
    assert either.ask("a", "10.77.0.1", 7000) == " 10.77.0.2"
    configs = [either.portmap(result, (8080, 80, "tcp")), either.bridge(prevResult=result)]
    for config in reversed(configs):
        assert either.good("CHECK", config, "a") is None
    for _ in range(2):
        for config in configs:
            assert either.good("DEL", config, "a") is None
        either.nothing_left()
    assert either.links() == ["cni0"]


@pytest.mark.parametrize("masquerade", [False, True], ids=["cluster", "alone"])
def test_who_sees_a_pod_of_the_written_configuration(place, masquerade):
    conf = place.scratch / "conf"
    install(
        place.programs,
        conf,
        socket=str(place.socket),
        state=str(place.state),
        subnets=["10.77.0.0/24"],
        masquerade=masquerade,
    )
    config = json.loads((conf / "10-narthex.conflist").read_text())
    bridge = {**config["plugins"][0], "cniVersion": config["cniVersion"], "name": config["name"]}
    place.add("a", config={**bridge, "ipam": {**bridge["ipam"], "dataDir": str(place.networks)}})
    # Pods of another node, behind a route.
    ip_batch(place.outside, ["link set lo up", "addr add 10.77.1.2/32 dev lo", f"route add 10.77.0.0/24 via {NODE4}"])
    ip_batch(place.name, [f"route add 10.77.1.0/24 via {OUTSIDE4}"])
    place.serve("o", 7000)
    assert place.ask("a", "10.77.1.2", 7000) == f"o {NODE4 if masquerade else '10.77.0.2'}"


def test_both_ways_give_the_same(tmp_path):
    seen = []
    for agent in (False, True):
        with Place(tmp_path / str(agent), agent) as place:
            said = [place.add("a", (8080, 80, "tcp", "192.0.2.1"), (53, 53, "udp"))]
            said += [place.call("ADD", place.bridge(), "a"), place.call("STATUS", place.bridge(), "a")]
            said += [place.call("ADD", place.bridge(ipam={}), "a"), place.call("CHECK", place.bridge(), "a")]
            said += [place.call("ADD", b"{", "a", plugin="bridge"), place.call("VERSION", b"", "a", plugin="ptp")]
            rules = run(["nft", "list", "ruleset"], namespace=place.name)
            leases = {path.name: path.read_text() for path in place.networks.glob("net/*")}
            text = json.dumps([said, rules, leases, place.records()])
            text = re.sub(r"([0-9a-f]{2}:){5}[0-9a-f]{2}|veth[0-9a-f]{8}", "X", text).replace(place.name, "NODE")
            seen.append(text)
    assert seen[0] == seen[1]


def test_the_first_ipv6_packet_gets_through(place):
    """On a fresh bridge duplicate address detection would take a second and more: no address of ours is in it."""
    place.serve("", 7000)
    place.add("a")
    for name in (place.name, f"{place.name}a"):
        shown = run(["ip", "-6", "addr", "show", "tentative", "scope", "global"], namespace=name)
        assert shown == "", shown
    assert place.ask("a", "fd77::1", 7000) == " fd77::2"
    place.serve("a", 7001)
    assert place.ask("", "fd77::2", 7001) == "a fd77::1"


def test_an_address_that_changes_hands_is_reached_at_once(place):
    """Who remembers the old holder looks for another only after five seconds and three probes."""
    config = place.bridge()
    config["ipam"]["ranges"] = [[{"subnet": "10.77.0.0/29"}], [{"subnet": "fd77::/125"}]]
    place.add("n", config=config)
    for turn in "ab":
        config["args"] = {"cni": {"ips": ["10.77.0.5", "fd77::5"]}}
        place.pod(turn)
        place.good("ADD", config, turn)
        place.serve(turn, 7000)
        for who in ("n", ""):
            for address in ("10.77.0.5", "fd77::5"):
                assert (place.ask(who, address, 7000, patience=4) or "").startswith(turn), (who, address)
        place.good("DEL", config, turn)


def test_masquerade_is_for_what_leaves(place):
    for index, name in enumerate("ab"):
        place.add(name)
        place.serve(name, 7000 + index)
    with_outside = place.outside
    place.serve("o", 7002)
    assert place.ask("a", OUTSIDE4, 7002) == f"o {NODE4}"
    assert place.ask("a", OUTSIDE6, 7002) == f"o {NODE6}"
    assert place.ask("a", "10.77.0.3", 7001) == "b 10.77.0.2"
    assert place.ask("a", "fd77::3", 7001) == "b fd77::2"
    ip_batch(with_outside, [f"route add 10.77.0.0/24 via {NODE4}"])
    assert place.ask(with_outside, "10.77.0.2", 7000) == f"a {OUTSIDE4}"


def test_a_failed_add_leaves_nothing(either):
    path = either.pod("a")
    ip_batch(path.rpartition("/")[2], ["link add eth0 type veth peer name other"])
    assert "File exists" in either.bad("ADD", either.bridge(), "a")["msg"]
    either.nothing_left()
    wrong = either.bridge()
    wrong["ipam"]["routes"].append({"dst": "192.168.7.0/24", "gw": "203.0.113.9"})
    either.pod("b")
    either.bad("ADD", wrong, "b")
    either.nothing_left()
    assert either.good("ADD", either.bridge(), "b")["ips"]


def test_a_second_add_leaves_the_first_alone(either):
    result = either.add("a", (8080, 80, "tcp"))
    before = either.reserved(), either.records(), either.owners()
    assert "duplicate allocation" in either.bad("ADD", either.bridge(), "a")["msg"]
    assert "already" in either.bad("ADD", either.portmap(result, (9090, 90, "tcp")), "a")["msg"]
    assert (either.reserved(), either.records(), either.owners()) == before
    either.good("CHECK", either.bridge(prevResult=result), "a")
    either.good("CHECK", either.portmap(result, (8080, 80, "tcp")), "a")


def test_twenty_at_once(either):
    names = [f"p{number}" for number in range(20)]
    for name in names:
        either.pod(name)

    def whole(name):
        result = either.good("ADD", either.bridge(), name)
        port = (8000 + int(name[1:]), 80, "tcp")
        return either.good("ADD", either.portmap(result, port), name)

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(whole, names))
        given = [address for result in results for address in addresses(result)]
        assert len(set(given)) == 40
        assert len(either.owners()) == 20
        list(pool.map(lambda name: either.good("DEL", either.portmap(results[0], (1, 1)), name), names))
        list(pool.map(lambda name: either.good("DEL", either.bridge(), name), names))
    either.nothing_left()


def test_a_dry_pool_takes_back_what_no_namespace_holds(place):
    config = place.bridge()
    config["ipam"]["ranges"] = [[{"subnet": "10.77.0.0/29"}]]
    for name in "abcde":
        place.add(name, config=config)
    place.pod("f")
    assert place.bad("ADD", config, "f")["code"] == 50
    assert place.bad("STATUS", config, "f")["code"] == 50
    place.drop_pod("b")
    place.drop_pod("d")
    got = addresses(place.good("ADD", config, "f"))
    assert got[0] in ("10.77.0.3/29", "10.77.0.5/29")
    place.pod("g")
    assert addresses(place.good("ADD", config, "g"))[0] in {"10.77.0.3/29", "10.77.0.5/29"} - set(got)
    place.pod("h")
    assert "no IP addresses available" in place.bad("ADD", config, "h")["msg"]


def test_after_a_reboot_an_attachment_can_be_made_again(place):
    """Namespaces and rules are gone, files are there; some runtimes keep their containers' ids."""
    place.add("a")
    for record in place.state.glob("pods/*"):
        record.write_text(re.sub('"boot":"[^"]*"', '"boot":"before"', record.read_text()))
    place.drop_pod("a")
    assert place.add("a")["ips"]


def test_host_ports_keep_the_source(either):
    either.add("a", (8080, 80, "tcp"), (8081, 80, "tcp", NODE4), (8053, 53, "udp"))
    either.add("b")
    either.serve("a", 80)
    either.serve("a", 53, socket.SOCK_DGRAM)
    out = either.outside
    assert either.ask(out, NODE4, 8080) == f"a {OUTSIDE4}"
    assert either.ask(out, NODE6, 8080) == f"a {OUTSIDE6}"
    assert either.ask(out, NODE4, 8053, socket.SOCK_DGRAM) == f"a {OUTSIDE4}"
    assert either.ask(out, NODE4, 8081) == f"a {OUTSIDE4}"
    # from the node, by its own address and by loopback; from another pod, and from the pod itself
    assert either.ask("", NODE4, 8080) == f"a {NODE4}"
    assert either.ask("", "127.0.0.1", 8080) == "a 10.77.0.1"
    assert either.ask("", "127.0.0.1", 8081, patience=0.5) is None
    assert either.ask("", "10.77.0.1", 8081, patience=0.5) is None
    for seen, by_rules in ((("10.77.0.1", "fd77::1"), 0), (("10.77.0.3", "fd77::3"), 1)):
        bridges_use_rules(either, by_rules)
        assert either.ask("a", NODE4, 8080) == "a 10.77.0.1"
        assert either.ask("a", NODE6, 8080) == "a fd77::1"
        assert either.ask("b", NODE4, 8080) == f"a {seen[0]}"
        assert either.ask("b", NODE6, 8080) == f"a {seen[1]}"


def bridges_use_rules(place, on):
    """Say whether packets within a bridge pass the rules of the node: then replies to other pods find their way back."""
    with in_namespace(place.name):
        for family in ("", "6"):
            Path(f"/proc/sys/net/bridge/bridge-nf-call-ip{family}tables").write_text(str(on))


def test_an_older_table_is_completed(place):
    """The next host port adds what an older version's table lacks. Host ports of other pods stay."""
    place.add("a", (8080, 80, "tcp"))
    place.serve("a", 80)
    table = ("inet", "narthex-hostport")
    run(["nft", "flush", "chain", *table, "masquerade-answers"], namespace=place.name)
    run(["nft", "delete", "set", *table, "self4"], namespace=place.name)
    place.add("b", (8081, 80, "tcp"))
    place.serve("b", 80)
    for number, name in enumerate("ab"):
        assert place.ask(place.outside, NODE4, 8080 + number) == f"{name} {OUTSIDE4}"
    bridges_use_rules(place, 1)
    assert place.ask("a", NODE4, 8081) == "b 10.77.0.2"
    assert place.ask("b", NODE4, 8081) == "b 10.77.0.1"


def test_others_cannot_reach_loopback_by_the_bridge(place):
    place.add("a", (8080, 80, "tcp"))
    place.serve("", 7000, address="127.0.0.1")
    path = f"{place.name}a"
    ip_batch(path, ["route add 127.0.0.5 via 10.77.0.1 dev eth0", "addr del 127.0.0.1/8 dev lo"])
    rules = run(["nft", "list", "table", "inet", "narthex-hostport"], namespace=place.name)
    assert "iifname @links ip daddr 127.0.0.0/8 drop" in rules and '"cni0"' in rules


def test_traffic_through_the_node_is_left_alone(place):
    place.add("a", (8080, 80, "tcp"))
    place.add("b")
    place.serve("o", 8080)
    place.serve("a", 80)
    assert place.ask("b", OUTSIDE4, 8080) == f"o {NODE4}"


def test_a_taken_host_port_is_refused_with_its_holder(either):
    either.add("a", (8080, 80, "tcp"), (9000, 80, "tcp"))
    result = either.add("b")
    said = either.bad("ADD", either.portmap(result, (7070, 80, "tcp"), (8080, 80, "tcp")), "b")
    assert said["code"] == 100 and "tcp 8080 is taken by container a (network net" in said["msg"]
    assert either.owners() == ["net:a:eth0", "net:b:eth0"]
    assert either.records() == [
        "masquerade/net:a:eth0",
        "masquerade/net:b:eth0",
        "pods/net:a:eth0",
        "pods/net:b:eth0",
        "ports/net:a:eth0",
    ]
    either.drop_pod("a")
    assert either.good("ADD", either.portmap(result, (8080, 80, "tcp")), "b")
    either.serve("b", 80)
    assert either.ask(either.outside, NODE4, 8080) == f"b {OUTSIDE4}"


def test_udp_clients_follow_a_new_holder(place):
    ports = ((8053, 53, "udp"),)
    source = (OUTSIDE4, 40000)
    for name in "ab":
        result = place.add(name, *ports)
        place.serve(name, 53, socket.SOCK_DGRAM)
        asked = place.ask(place.outside, NODE4, 8053, socket.SOCK_DGRAM, source=source)
        assert asked == f"{name} {OUTSIDE4}"
        place.good("DEL", place.portmap(result, *ports), name)


def test_check_finds_what_is_missing(place):
    result = place.add("a", (8080, 80, "tcp"))
    inside, veth = f"{place.name}a", result["interfaces"][1]["name"]
    bridge, ports = place.bridge(prevResult=result), place.portmap(result, (8080, 80, "tcp"))
    changes = [
        (inside, "addr del 10.77.0.2/24 dev eth0", "address", bridge),
        (inside, "addr add 10.77.0.2/24 dev eth0", None, None),
        (inside, "route add default via 10.77.0.1", None, bridge),
        (inside, "route del default via 10.77.0.1", "route", bridge),
        (inside, "route add default via 10.77.0.1", None, bridge),
        (place.name, f"link set {veth} nomaster", "not a port", bridge),
        (place.name, f"link set {veth} master cni0", None, bridge),
        (place.name, "addr del 10.77.0.1/24 dev cni0", "lost its address", bridge),
        (place.name, "addr add 10.77.0.1/24 dev cni0", None, bridge),
    ]
    for namespace, change, finds, config in changes:
        ip_batch(namespace, [change])
        if finds:
            assert finds in place.bad("CHECK", config, "a")["msg"], change
        elif config:
            place.good("CHECK", config, "a")
    place.good("CHECK", ports, "a")
    run(
        ["nft", "delete", "element", "inet", "narthex-hostport", "ports4", "{", "tcp", ".", "8080", "}"],
        namespace=place.name,
    )
    assert "host ports" in place.bad("CHECK", ports, "a")["msg"]
    run(["nft", "flush", "ruleset"], namespace=place.name)
    assert "masqueraded" in place.bad("CHECK", bridge, "a")["msg"]
    (place.networks / "net" / "10.77.0.2").unlink()
    (place.networks / "net" / "fd77::2").unlink()
    assert "reserved" in place.bad("CHECK", bridge, "a")["msg"]
    assert "prevResult" in place.bad("CHECK", place.bridge(), "a")["msg"]


def test_gc_leaves_the_valid_ones(either):
    for index, name in enumerate("abc"):
        result = either.add(name, (8080 + index, 80, "tcp"))
    valid = {"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}]}
    for config in (either.bridge(**valid), either.portmap(result, **valid)):
        either.good("GC", config, "x", environment={"CNI_CONTAINERID": None, "CNI_NETNS": None, "CNI_IFNAME": None})
    assert either.owners() == ["net:b:eth0"]
    assert either.reserved() == ["10.77.0.3", "fd77::3"]
    assert {record.partition("/")[2] for record in either.records()} == {"net:b:eth0"}
    assert len([name for name in either.links() if name.startswith("veth")]) == 1
    either.serve("b", 80)
    assert either.ask(either.outside, NODE4, 8081) == f"b {OUTSIDE4}"


def test_another_network_is_not_collected(place):
    place.add("a")
    place.add(
        "b",
        config=place.bridge(
            name="second", bridge="cni1", ipam={**place.bridge()["ipam"], "ranges": [[{"subnet": "10.78.0.0/24"}]]}
        ),
    )
    place.good("GC", place.bridge(**{"cni.dev/valid-attachments": []}), "x")
    assert place.owners() == ["second:b:eth0"] and place.reserved() == ["10.78.0.2"]
    place.good("GC", place.bridge(), "x")
    assert place.reserved() == ["10.78.0.2"], "without a list, GC removes nothing"
    place.good("GC", place.bridge(**{"name": "second", "cni.dev/attachments": []}), "x")
    assert place.reserved() == []


def test_status(either):
    assert either.good("STATUS", either.bridge(), "x") is None
    assert either.good("STATUS", either.portmap({}), "x") is None
    assert either.bad("STATUS", either.bridge(cniVersion="1.0.0"), "x")["code"] == 1


def test_an_address_of_another_range_on_the_bridge(place):
    ip_batch(place.name, ["link add cni0 type bridge", "addr add 10.66.0.1/24 dev cni0", "link set cni0 up"])
    place.pod("a")
    said = place.bad("ADD", place.bridge(), "a")
    assert "already has an IP address different from" in said["msg"], "with or without ports"
    assert place.reserved() == place.records() == []
    place.good("ADD", place.bridge(forceAddress=True), "a")
    shown = run(["ip", "-br", "-4", "addr", "show", "cni0"], namespace=place.name)
    assert shown.split()[2:] == ["10.77.0.1/24"]
    other = place.bridge()
    other["ipam"]["ranges"] = [[{"subnet": "10.55.0.0/24"}]]
    place.pod("b")
    said = place.bad("ADD", other, "b")
    assert "already has an IP address different from" in said["msg"]
    assert place.reserved() == ["10.77.0.3", "fd77::3"]
    place.good("ADD", {**other, "forceAddress": True}, "b")
    ip_batch(place.name, ["link add notbridge type veth peer name nb2"])
    place.pod("c")
    assert "not a bridge" in place.bad("ADD", place.bridge(bridge="notbridge"), "c")["msg"]


def test_port_isolation_mtu_mac_and_no_addresses(place):
    config = place.bridge(portIsolation=True, mtu=1400, runtimeConfig={"mac": "02:11:22:33:44:55"})
    for name, port in (("a", 7000), ("b", 7001)):
        place.add(name, config={**config, "runtimeConfig": {"mac": f"02:11:22:33:44:5{port - 7000}"}})
        place.serve(name, port)
    link = json.loads(run(["ip", "-j", "link", "show", "eth0"], namespace=f"{place.name}a"))[0]
    assert (link["mtu"], link["address"]) == (1400, "02:11:22:33:44:50")
    assert place.ask("a", "10.77.0.3", 7001, patience=0.5) is None
    assert place.ask("", "10.77.0.3", 7001) == "b 10.77.0.1"
    place.pod("c")
    bare = place.bridge(disableContainerInterface=True, isGateway=False, ipMasq=False)
    del bare["ipam"]
    assert "ips" not in place.good("ADD", bare, "c")
    assert json.loads(run(["ip", "-j", "link", "show", "eth0"], namespace=f"{place.name}c"))[0]["operstate"] == "DOWN"
    place.good("DEL", bare, "c")


def test_ptp(either):
    config = {**either.bridge(), "type": "ptp"}
    for name in "ab":
        result = either.add(name, (8080 + ord(name) - 97, 80, "tcp"), config=config)
        either.serve(name, 80)
        either.good("CHECK", {**config, "prevResult": result}, name)
    assert either.ask("a", "10.77.0.3", 80) == "b 10.77.0.2"
    assert either.ask("a", "fd77::3", 80) == "b fd77::2"
    assert either.ask("a", NODE4, 8080) == "a 10.77.0.1", "hairpin"
    assert either.ask("b", NODE4, 8080) == "a 10.77.0.3"
    assert either.ask("", "127.0.0.1", 8081) == "b 10.77.0.1"
    for name in "ab":
        either.good("DEL", either.portmap(result, (1, 1, "tcp")), name)
        either.good("DEL", config, name)
    either.nothing_left()
    assert either.links() == []


def test_loopback(either):
    either.pod("a")
    config = {"cniVersion": "1.1.0", "name": "lo", "type": "loopback"}
    ip_batch(f"{either.name}a", ["link set lo down"])
    said = either.good("ADD", config, "a", environment={"CNI_IFNAME": "lo"})
    assert addresses(said) == ["127.0.0.1/8", "::1/128"] and said["interfaces"][0]["name"] == "lo"
    either.good("CHECK", config, "a")
    either.good("DEL", config, "a")
    assert "lo is down" in either.bad("CHECK", config, "a")["msg"]


def test_flannel(place):
    env = place.scratch / "subnet.env"
    config = {
        "cniVersion": "1.0.0",
        "name": "cbr0",
        "type": "flannel",
        "subnetFile": str(env),
        "dataDir": str(place.scratch / "flannel"),
        "ipam": {"dataDir": str(place.networks)},
        "delegate": {"hairpinMode": True},
    }
    place.pod("a")
    assert "subnet.env: no such file" in place.bad("ADD", config, "a")["msg"]
    env.write_text(
        "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
    )
    result = place.good("ADD", config, "a")
    assert addresses(result) == ["10.244.3.2/24"] and result["cniVersion"] == "1.0.0"
    assert result["routes"] == [{"dst": "10.244.0.0/16"}]
    assert "10.244.3.0/24 dev cni0" in run(["ip", "route"], namespace=place.name)
    assert place.owners() == [], "the daemon masquerades"
    env.unlink()
    place.good("DEL", config, "a")
    place.nothing_left()
    assert list((place.scratch / "flannel").iterdir()) == []


def test_flannel_collects_with_its_delegate(place):
    env = place.scratch / "subnet.env"
    env.write_text(
        "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
    )
    config = {
        "cniVersion": "1.1.0",
        "name": "cbr0",
        "type": "flannel",
        "subnetFile": str(env),
        "dataDir": str(place.scratch / "flannel"),
        "ipam": {"dataDir": str(place.networks)},
    }
    for name in "ab":
        place.pod(name)
        place.good("ADD", config, name)
    (place.scratch / "flannel" / "other").write_text('{"name":"another","type":"bridge"}')
    place.good("STATUS", config, "x")
    place.good("GC", {**config, "cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}]}, "x")
    assert place.reserved() == ["10.244.3.3"] and place.owners() == ["cbr0:b:eth0"]
    assert sorted(path.name for path in (place.scratch / "flannel").iterdir()) == ["b", "other"]


def test_rules_come_back(tmp_path):
    with Place(tmp_path, agent=True) as place:
        place.add("a", (8080, 80, "tcp"))
        place.serve("a", 80)
        run(["nft", "flush", "ruleset"], namespace=place.name)
        end = time.monotonic() + 30
        while place.ask(place.outside, NODE4, 8080, patience=0.5) is None and time.monotonic() < end:
            time.sleep(0.1)
        assert place.ask(place.outside, NODE4, 8080) == f"a {OUTSIDE4}"
        assert place.ask("", "127.0.0.1", 8080) == "a 10.77.0.1"
        place.stop_agent()
        run(["nft", "flush", "ruleset"], namespace=place.name)
        place.start_agent()
        assert place.ask(place.outside, NODE4, 8080) == f"a {OUTSIDE4}"
        place.serve("o", 7002)
        assert place.ask("a", OUTSIDE4, 7002) == f"o {NODE4}"


def test_an_agent_of_another_namespace_is_not_asked(tmp_path):
    with Place(tmp_path, agent=True) as one, Place(tmp_path) as other:
        assert other.socket == one.socket
        other.add("a")
        assert other.links()[0] == "cni0" and one.links() == []


def test_an_agent_that_is_killed(tmp_path):
    with Place(tmp_path, agent=True) as place:
        result = place.add("a", (8080, 80, "tcp"))
        place.stop_agent()
        place.good("CHECK", place.bridge(prevResult=result), "a")
        place.add("b")
        for name in "ab":
            place.good("DEL", place.portmap(result, (8080, 80, "tcp")), name)
            place.good("DEL", place.bridge(), name)
        place.nothing_left()


def test_killed_at_any_effect(place):
    place.pod("a")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    argv = [
        sys.executable,
        str(ROOT / "tests" / "cni" / "kernel" / "cni_crash.py"),
        str(place.scratch),
        f"/run/netns/{place.name}a",
    ]
    with in_namespace(place.name):
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    adds, deletes = map(int, done.stdout.split())
    assert adds > 30 and deletes > 10
    assert place.owners() == []


HOSTILE = [
    b"",
    b"\x00" * 100,
    b"[" * 500_000,
    b'{"a":' * 200_000,
    b'{"cniVersion":"1.1.0","name":"net","pad":"' + b"x" * (2 << 20) + b'"}',
    b'{"cniVersion":"1.1.0","name":"net","name":"../../x"}',
    b'{"cniVersion":"1.1.0","name":"../../../tmp/x"}',
    b'{"cniVersion":"1.1.0","name":"a\\u0000b"}',
    b'{"cniVersion":"1.1.0","name":"net","ipam":{"type":"../../bin/sh"}}',
    b'{"cniVersion":"1.1.0","name":"net","ipam":{"type":"host-local","dataDir":"/tmp/../etc","subnet":"10.0.0.0/24"}}',
    b'{"cniVersion":"1.1.0","name":"net","ipam":{"type":"host-local","dataDir":7}}',
    b'{"cniVersion":"1.1.0","name":"net","dataDir":"../x","subnetFile":"/proc/self/../../etc/passwd","ipam":"x"}',
    b'{"cniVersion":"1.1.0","name":"net","prevResult":{"interfaces":"x","ips":[{"address":"1.1.1.1/99"}]},"bridge":"../../x","ipam":7}',
]


def test_hostile_requests(either):
    """Each plugin answers with an error of the specification, and nothing is written, whatever is asked."""
    either.pod("a")
    before = {path for path in either.scratch.rglob("*") if "__pycache__" not in str(path)}
    names = [("../../x", "eth0"), ("a", "../eth0"), ("a\x01", "eth0"), ("a", "eth\x1b0"), ("a" * 5000, "eth0")]
    plugins = ("bridge", "flannel", "host-local", "portmap", "ptp")

    def asked(case):
        plugin, stdin, environment = case
        status, said = either.call("ADD", stdin, "a", plugin=plugin, environment=environment)
        codes = (4, 6, 7, 50) if plugin == "flannel" else (4, 6, 7)
        assert status == 1 and said["code"] in codes, (plugin, stdin[:80], said)
        assert said["cniVersion"] and len(said["msg"]) < 1000

    good = json.dumps(either.bridge()).encode()
    cases = [(plugin, stdin, {}) for stdin in HOSTILE for plugin in plugins]
    cases += [("bridge", good, {"CNI_CONTAINERID": name, "CNI_IFNAME": interface}) for name, interface in names]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(asked, cases))
    assert {path for path in either.scratch.rglob("*") if "__pycache__" not in str(path)} == before
    assert either.links() == []
    os.mkfifo(either.scratch / "pipe")
    for path in ("/etc/passwd", "/", "/proc/self/ns/mnt", str(either.scratch / "pipe"), f"/run/netns/{either.name}"):
        said = either.bad("ADD", either.bridge(), "a", plugin="bridge", environment={"CNI_NETNS": path})
        assert said["code"] == 8, (path, said)
    gone = {"CNI_NETNS": "/run/netns/not-there"}
    assert either.bad("ADD", either.bridge(), "a", plugin="bridge", environment=gone)["code"] == 3
    either.nothing_left()
    assert either.good("ADD", either.bridge(), "a")["ips"], "and the next good one works"


def test_others_plugins_are_run(place):
    """An IPAM plugin that is not ours is started with the same environment and the same configuration."""
    config = place.bridge(cniVersion="1.0.0")
    config["ipam"] = {"type": "static", "addresses": [{"address": "10.77.0.9/24", "gateway": "10.77.0.1"}]}
    path = {"CNI_PATH": f"{place.programs}:/usr/lib/cni"}
    place.pod("a")
    assert "failed to find plugin" in place.bad("ADD", config, "a")["msg"]
    assert addresses(place.good("ADD", config, "a", environment=path)) == ["10.77.0.9/24"]
    place.serve("a", 7000)
    assert place.ask("", "10.77.0.9", 7000) == "a 10.77.0.1"
    place.good("DEL", config, "a", environment=path)
    place.nothing_left()
    config["ipam"]["addresses"] = [{"address": "nonsense"}]
    assert place.bad("ADD", config, "a", environment=path)["code"] >= 7
    place.nothing_left()
