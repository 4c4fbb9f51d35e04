"""The world and the probes tell apart what they must, with rules written by hand: the witness is itself on trial here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from narthex.linux.namespaces import namespace_exists, namespace_names
from narthex.linux.run import run
from narthex.model.net import IPFamily
from narthex.testing.findings import WitnessFinding
from narthex.testing.kernel import witness as kernel
from narthex.testing.kernel.probe import PacketListeners, Tap
from narthex.testing.kernel.witness import KernelWitness, listen
from narthex.testing.kernel.world import PREFIX, World, lay_out
from narthex.testing.scenario import Scenario, parse

pytestmark = pytest.mark.kernel

NODE = {
    "name": "worker-a",
    "ips": ["10.20.0.11", "10.20.1.11", "fd20::11"],
    "podCIDRs": ["10.64.1.0/24", "fd64:0:0:1::/64"],
    "config": {"detectLocalMode": "ClusterCIDR", "clusterCIDR": "10.64.0.0/12,fd64::/48"},
}
VIP = {4: "10.110.0.5", 6: "fd6e::5"}
POD = {4: "10.64.1.10", 6: "fd64:0:0:1::a"}
FAR_POD = {4: "10.64.2.10", 6: "fd64:0:0:2::a"}
CLIENT = {4: "10.64.1.200", 6: "fd64:0:0:1::c8"}
OUTSIDE = {4: "198.51.100.7", 6: "2001:db8:c::7"}


def endpoints(version: int, *addresses: str) -> dict[str, object]:
    """A slice with all three protocols on port 80."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"web-{version}", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": f"IPv{version}",
        "ports": [{"name": p.lower(), "protocol": p, "port": 80} for p in ("TCP", "UDP", "SCTP")],
        "endpoints": [{"addresses": [a], "conditions": {"ready": True}} for a in addresses],
    }


def scenario(version: int, *flows: dict[str, object], node: dict[str, object] = NODE) -> Scenario:
    """A scenario whose rules the test writes itself."""
    doc = {
        "name": "by-hand",
        "modes": ["nftables"],
        "node": node,
        "objects": [endpoints(version, POD[version], FAR_POD[version], "10.20.0.11" if version == 4 else "fd20::11")],
        "flows": [{"label": f"flow {number}", **flow} for number, flow in enumerate(flows)],
    }
    return parse(doc, "by-hand.yaml", "by-hand")


@contextmanager
def standing(case: Scenario, rules: str) -> Iterator[KernelWitness]:
    """The world of a scenario with these rules in its node."""
    with ExitStack() as stack:
        world = stack.enter_context(World(lay_out(case, case.flows)))
        ears = stack.enter_context(PacketListeners(IPFamily, {flow.protocol for flow in case.flows}))
        listen(case, world, ears)
        tap = stack.enter_context(Tap(world.node))
        run(["nft", "-f", "-"], stdin=rules, namespace=world.node)
        yield KernelWitness(case, "nftables", world, ears, tap)


def judged(case: Scenario, rules: str) -> list[WitnessFinding]:
    """What the kernel does to each flow."""
    with standing(case, rules) as stand:
        return [stand.judge_flow(flow, None) for flow in case.flows]


def nat(version: int, target: str, masquerade: str = "") -> str:
    """Rules that send the VIP's port 80 to a target expression, and masquerade what matches."""
    ip = "ip" if version == 4 else "ip6"
    send = f"{ip} daddr {VIP[version]} meta l4proto {{ tcp, udp, sctp }} th dport 80 dnat to {target}"
    return f"""table {ip} t {{
        chain pre {{ type nat hook prerouting priority dstnat; {send}; }}
        chain out {{ type nat hook output priority -100; {send}; }}
        chain post {{ type nat hook postrouting priority srcnat; {masquerade} }}
    }}"""


def at(address: str) -> str:
    """`address:80` as expectations and nft print it."""
    return f"[{address}]:80" if ":" in address else f"{address}:80"


def got(findings: list[WitnessFinding]) -> list[object]:
    """What was seen, flow by flow."""
    return [finding.got for finding in findings]


@pytest.mark.parametrize("proto", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("version", [4, 6])
def test_source_kept_and_source_rewritten(version: int, proto: str) -> None:
    flow = {"to": VIP[version], "port": 80, "proto": proto, "expect": {"dnat": [at(POD[version])], "masq": False}}
    host = "10.20.0.11" if version == 4 else "fd20::11"
    sources = [CLIENT[version], OUTSIDE[version], host]
    case = scenario(version, *[{**flow, "from": source} for source in sources])
    kept = {"dnat": [at(POD[version])], "masq": False}
    assert got(judged(case, nat(version, at(POD[version])))) == [kept] * 3
    rewritten = judged(case, nat(version, at(POD[version]), "masquerade fully-random;"))
    assert got(rewritten) == [{"dnat": [at(POD[version])], "masq": True}] * 3
    assert not any(finding.ok for finding in rewritten)


@pytest.mark.parametrize("proto", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("version", [4, 6])
def test_far_pod_sees_the_masquerade_of_the_host(version: int, proto: str) -> None:
    host = "10.20.0.11" if version == 4 else "fd20::11"
    expect = {"dnat": [at(FAR_POD[version])], "masq": True}
    case = scenario(version, {"from": host, "to": VIP[version], "port": 80, "proto": proto, "expect": expect})
    assert judged(case, nat(version, at(FAR_POD[version]), "masquerade;"))[0].ok
    assert got(judged(case, nat(version, at(FAR_POD[version])))) == [{**expect, "masq": False}]


@pytest.mark.parametrize("proto", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("version", [4, 6])
def test_refusal_silence_and_leaving_alone(version: int, proto: str) -> None:
    ip = "ip" if version == 4 else "ip6"
    host = "10.20.0.11" if version == 4 else "fd20::11"
    sources = (CLIENT[version], OUTSIDE[version], host)
    to = {"to": VIP[version], "proto": proto}
    ports = {81: "reject", 82: "drop", 83: "none"}
    flows = [{"from": s, "port": port, "expect": word, **to} for s in sources for port, word in ports.items()]
    guard = f"{ip} daddr {VIP[version]} th dport 81 reject; {ip} daddr {VIP[version]} th dport 82 drop;"
    rules = f"""table {ip} t {{
        chain through {{ type filter hook forward priority filter; {guard} }}
        chain out {{ type filter hook output priority filter; {guard} }}
    }}"""
    assert got(judged(scenario(version, *flows), rules)) == ["reject", "drop", "none"] * 3


@pytest.mark.parametrize("version", [4, 6])
def test_all_of_several_targets_and_one_too_many(version: int) -> None:
    flow = {"from": CLIENT[version], "to": VIP[version], "port": 80, "proto": "TCP"}
    full = {"dnat": [at(POD[version]), at(FAR_POD[version])], "masq": False}
    short = {"dnat": [at(POD[version])], "masq": False}
    case = scenario(version, {**flow, "expect": full}, {**flow, "expect": short})
    # In turn, not by chance: the second target shows however few draws there are.
    rules = nat(version, f"numgen inc mod 2 map {{ 0: {POD[version]}, 1: {FAR_POD[version]} }}")
    complete, short_one = judged(case, rules)
    assert complete.ok and not short_one.ok
    (alone,) = judged(scenario(version, {**flow, "expect": full}), nat(version, at(POD[version])))
    assert alone.got == short and not alone.ok


@pytest.mark.parametrize("proto", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("pods", [POD, FAR_POD], ids=["here", "elsewhere"])
def test_hairpin_with_and_without_masquerade(version: int, proto: str, pods: dict[int, str]) -> None:
    pod = pods[version]
    flow = {"from": pod, "to": VIP[version], "port": 80, "proto": proto}
    case = scenario(version, {**flow, "expect": {"dnat": [at(pod)], "masq": True}})
    assert judged(case, nat(version, at(pod), "masquerade;"))[0].ok
    assert got(judged(case, nat(version, at(pod)))) == [{"dnat": [at(pod)], "masq": False}]


def test_an_answer_that_cannot_come_back_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PATIENCE", 2.5)
    flow = {
        "from": CLIENT[4],
        "to": VIP[4],
        "port": 80,
        "proto": "TCP",
        "expect": {"dnat": [at(POD[4])], "masq": False},
    }
    lost = (
        nat(4, at(POD[4]))
        + "\ntable ip u { chain f { type filter hook forward priority filter; ct direction reply drop; }\n}"
    )
    (said,) = got(judged(scenario(4, flow), lost))
    assert said == {"error": "10.64.1.10:80 got it, but no answer came back"}


def test_own_addresses_take_what_no_rule_touches() -> None:
    flows = [
        {"from": source, "to": to, "port": 31000, "proto": proto, "expect": "none"}
        for source in (CLIENT[4], OUTSIDE[4], "10.20.0.11")
        for to in ("10.20.0.11", "10.20.1.11")
        for proto in ("TCP", "UDP", "SCTP")
    ]
    assert {str(said) for said in got(judged(scenario(4, *flows), ""))} == {"none"}


def test_a_flow_comes_in_by_the_interface_it_names() -> None:
    flow = {
        "from": OUTSIDE[4],
        "to": VIP[4],
        "port": 80,
        "proto": "TCP",
        "expect": {"dnat": [at(POD[4])], "masq": False},
    }
    flows = [{**flow, "iface": name} for name in ("eth7", "docker0", "cni0", "eth7")] + [flow]
    rules = nat(4, at(POD[4]), 'iifname "docker0" masquerade;')
    kept, rewritten = ({"dnat": [at(POD[4])], "masq": masq} for masq in (False, True))
    assert got(judged(scenario(4, *flows), rules)) == [kept, rewritten, kept, kept, kept]


def test_loopback_of_the_node_from_outside_and_from_itself() -> None:
    flows = [
        {"from": source, "to": "127.0.0.1", "port": 31000, "proto": proto, "expect": word}
        for source, word in ((CLIENT[4], "drop"), (OUTSIDE[4], "none"), ("127.0.0.1", "none"))
        for proto in ("TCP", "UDP")
    ]
    case = scenario(4, *flows)
    with standing(case, "") as stand:
        assert got([stand.judge_flow(flow, None) for flow in case.flows]) == ["drop"] * 2 + ["none"] * 4


def test_nothing_stays_behind() -> None:
    case = scenario(4, {"from": CLIENT[4], "to": VIP[4], "port": 80, "proto": "TCP", "expect": "none"})
    with pytest.raises(ZeroDivisionError), standing(case, "") as stand:
        name = stand.world.node
        assert namespace_exists(name)
        raise ZeroDivisionError
    assert not [left for left in namespace_names() if left.startswith(name) and name.startswith(PREFIX)]
