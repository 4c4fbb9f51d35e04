"""Which rules were left by a kube-proxy or by Narthex, and which are somebody else's."""

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.ipset import parse_ipsets
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.iptables.names import IPTABLES_CHAINS
from narthex.proxy.backends.leftovers import (
    find,
    has_kubelet,
    is_leftover_chain,
    is_leftover_set,
    is_leftover_table,
    is_virtual_server,
    save_chains,
)
from narthex.testing.build import endpoint, endpoint_slice, plan, service

GUARD = (
    "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "
    '"block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP'
)


def is_older_chain(owner_table, chain):
    return is_leftover_chain(owner_table, chain) and not IPTABLES_CHAINS.is_ours(owner_table, chain)


def table(name, chains, *rules):
    builtin = {"nat": ("PREROUTING", "OUTPUT", "POSTROUTING"), "filter": ("INPUT", "FORWARD", "OUTPUT")}
    lines = [f"*{name}", *(f":{chain} ACCEPT [0:0]" for chain in builtin.get(name, ()))]
    lines += [f":{chain} - [0:0]" for chain in chains]
    return "\n".join([*lines, *(f"-A {rule}" for rule in rules), "COMMIT", ""])


def only(text, kubelet=False, **more):
    (found,) = find(text, IPFamily.IPV4, kubelet, **more)
    return found


def test_what_mode_iptables_writes_is_all_found():
    rules = IptablesBackend().render(
        plan(
            service("shop/web", "10.110.0.1", type="NodePort", node_port=30080, source_ranges=("198.51.100.0/24",)),
            endpoint_slice("shop/web", endpoint("10.64.1.5")),
        )
    )
    text = IptablesBackend().text(rules)
    found = {one.table: one for one in find(text, IPFamily.IPV4, kubelet=False)}
    for name, chains in rules.chains.items():
        assert set(found[name].chains) == set(chains)
    jumps = sum(map(len, rules.jumps.values()))
    assert sum(len(one.jumps) for one in found.values()) == jumps > 0
    assert not any(one.kept for one in found.values())


def test_userspace_and_ipvs_modes_are_found():
    nat = only(
        table(
            "nat",
            ["KUBE-PORTALS-CONTAINER", "KUBE-NODEPORT-CONTAINER", "KUBE-LOAD-BALANCER", "KUBE-SERVICES"],
            'PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" '
            "-j KUBE-PORTALS-CONTAINER",
            "PREROUTING -m addrtype --dst-type LOCAL -m comment --comment x -j KUBE-NODEPORT-CONTAINER",
            'PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
            "KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER",
        )
    )
    assert len(nat.chains) == 4
    assert len(nat.jumps) == 3
    assert nat.script.splitlines()[:5] == ["*nat", *(f":{chain} - [0:0]" for chain in nat.chains)]
    assert nat.script.endswith("-X KUBE-SERVICES\nCOMMIT\n")
    filtered = only(
        table("filter", ["KUBE-IPVS-FILTER"], "INPUT -m comment --comment a -j KUBE-IPVS-FILTER"), owned=is_older_chain
    )
    assert filtered.chains == ("KUBE-IPVS-FILTER",)


def test_what_mode_iptables_owns_is_passed_over_when_it_stays():
    text = table("nat", ["KUBE-SERVICES"], "PREROUTING -j KUBE-SERVICES")
    assert find(text, IPFamily.IPV4, kubelet=False, owned=is_older_chain) == []


@pytest.mark.parametrize(
    "chain", ["KUBE-ROUTER-INPUT", "KUBE-POD-FW-ABCDEFGHIJKLMNOP", "KUBE-HOSTPORTS", "KUBE-KUBELET-CANARY", "DOCKER"]
)
def test_chains_of_others_are_not_touched(chain):
    assert find(table("filter", [chain], f"INPUT -j {chain}"), IPFamily.IPV4, kubelet=False) == []


def test_a_name_in_a_comment_is_no_jump():
    text = table("nat", ["KUBE-SERVICES"], 'OUTPUT -m comment --comment "-j KUBE-SERVICES" -j ACCEPT')
    found = only(text)
    assert (found.chains, found.jumps, found.kept) == (("KUBE-SERVICES",), (), {})


def test_what_others_use_stays_with_all_that_it_uses():
    """The CNI plugin portmap can be told to use kube-proxy's mark chain."""
    text = table(
        "nat",
        ["KUBE-SERVICES", "KUBE-SVC-AAAAAAAAAAAAAAAA", "KUBE-MARK-MASQ", "CNI-HOSTPORT-SETMARK", "KUBE-POSTROUTING"],
        "PREROUTING -j KUBE-SERVICES",
        "PREROUTING -s 10.0.0.1/32 -j KUBE-SERVICES",
        "KUBE-SERVICES -d 10.110.0.1/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA",
        "KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-MARK-MASQ",
        "CNI-HOSTPORT-SETMARK -j KUBE-MARK-MASQ",
    )
    found = only(text)
    assert found.chains == ("KUBE-POSTROUTING",)
    assert found.jumps == (("PREROUTING", "-j KUBE-SERVICES"),)
    assert "chain CNI-HOSTPORT-SETMARK uses it" in found.kept["KUBE-MARK-MASQ"]
    assert found.kept["KUBE-SVC-AAAAAAAAAAAAAAAA"] == "chain KUBE-SERVICES uses it, which stays"


def test_kubelets_firewall_stays():
    """Row 22.9."""
    mine = table("filter", ["KUBE-FIREWALL"], "INPUT -j KUBE-FIREWALL", f"KUBE-FIREWALL {GUARD}")
    found = only(mine)
    assert found.guard and found.chains == ("KUBE-FIREWALL",)
    assert find(mine, IPFamily.IPV4, kubelet=True) == []
    more = table("filter", ["KUBE-FIREWALL"], "KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP")
    assert find(more, IPFamily.IPV4, kubelet=False) == []


@pytest.mark.parametrize("kubelet", [True, False])
def test_a_guard_in_a_chain_of_others_is_not_left_silently(kubelet):
    other = "-m mark --mark 0x8000/0x8000 -j DROP"
    text = table(
        "filter", ["KUBE-FIREWALL"], "INPUT -j KUBE-FIREWALL", f"KUBE-FIREWALL {other}", f"KUBE-FIREWALL {GUARD}"
    )
    found = only(text, kubelet)
    assert found.chains == ()
    assert ("kubelet" in found.kept["KUBE-FIREWALL"]) is kubelet
    assert found.jumps == (() if kubelet else (("KUBE-FIREWALL", GUARD),))
    assert found.guard is not kubelet, "route_localnet is off where its guard is removed"
    assert found.script == ("" if kubelet else f"*filter\n-D KUBE-FIREWALL {GUARD}\nCOMMIT\n")


def test_a_kubelet_is_known_by_its_chains():
    assert has_kubelet(save_chains(table("mangle", ["KUBE-IPTABLES-HINT"])))
    assert not has_kubelet(save_chains(table("nat", ["KUBE-KUBELET-CANARY"])))


def test_tables_and_sets_by_name():
    assert is_leftover_table("kube-proxy") and is_leftover_table("narthex")
    assert not is_leftover_table("kube-network-policies")
    for name in (
        "KUBE-CLUSTER-IP",
        "KUBE-6-LOAD-BALANCER-SOURCE-CID",
        "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
        "KUBE-LOOP-BACK",
    ):
        assert is_leftover_set(name)
    for name in ("KUBE-SRC-ABC", "kube-router-svip", "KUBE-CLUSTER-IP-OF-MINE"):
        assert not is_leftover_set(name)


def test_virtual_servers_are_known_by_their_address_or_by_a_set():
    sets = parse_ipsets(
        "create KUBE-NODE-PORT-TCP bitmap:port range 0-65535\nadd KUBE-NODE-PORT-TCP 30080\n"
        "create mine hash:ip,port family inet\nadd mine 192.0.2.1,tcp:80\n"
        "create KUBE-6-EXTERNAL-IP hash:ip,port family inet6\nadd KUBE-6-EXTERNAL-IP fd20::11,udp:53\n"
        "create KUBE-NODE-PORT-SCTP-HASH hash:ip,port family inet\nadd KUBE-NODE-PORT-SCTP-HASH 10.20.0.11,sctp:30081\n"
    )
    bound = {"10.110.0.1", "fd6e::1"}
    for address, protocol, port, expected in (
        ("10.110.0.1", Protocol.TCP, 80, True),
        ("fd6e::1", Protocol.UDP, 53, True),
        ("10.20.0.11", Protocol.TCP, 30080, True),
        ("10.20.0.11", Protocol.UDP, 30080, False),
        ("10.20.0.11", Protocol.SCTP, 30081, True),
        ("10.20.0.12", Protocol.SCTP, 30081, False),
        ("fd20::11", Protocol.UDP, 53, True),
        ("fd20::11", Protocol.TCP, 53, False),
        ("192.0.2.1", Protocol.TCP, 80, False),
    ):
        assert is_virtual_server((address, protocol, port), bound, sets) is expected, (address, protocol, port)
