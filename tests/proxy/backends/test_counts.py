"""What the counters of rules count for."""

import pytest

from narthex.netfilter.ast import Set
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.counters import (
    ConnectionCount,
    NftCounterOwners,
    XtablesCounterOwners,
    counted_sets,
    invalid_dropped,
)
from narthex.proxy.backends.iptables import names
from narthex.testing.build import endpoint, endpoint_slice, plan, port_name, service

WEB = service("shop/web", "10.110.0.1", node_port=30001, type="NodePort")
SLICE = endpoint_slice("shop/web", endpoint("10.64.1.5"), endpoint("10.64.2.5", node="worker-b"), port=8080)
EMPTY = service("shop/empty", "10.110.0.9")
NAME = port_name("shop/web:http")


def test_every_element_that_sends_counts_for_its_owner():
    """The declarations come from the layout itself, so a map that the layout drops fails here."""
    made = plan(WEB, SLICE, EMPTY)
    table = BACKENDS["nftables"].render(made).table()
    declared = counted_sets(made, True)
    assert all(one.counter for one in declared.values())
    elements = [(name, key, data, 7) for name in declared for key, data in table.sets[name].elements.items()]
    found = list(NftCounterOwners(made).counted(elements))
    assert {(each.name, each.endpoint) for each in found} == {
        (NAME, None),
        (NAME, ("10.64.1.5", 8080)),
        (NAME, ("10.64.2.5", 8080)),
    }
    assert len({each.key for each in found}) == len(found) == 2 + 4
    assert {each.connections for each in found} == {7}


def test_elements_that_only_refuse_do_not_count():
    made = plan(EMPTY)
    elements = [("services", ("10.110.0.9", "tcp", 80), None, 3), ("endpoints", ("10.110.0.9", "tcp", 80, 0), None, 3)]
    assert list(NftCounterOwners(made).counted(elements)) == []


def test_all_maps_with_counters_are_asked():
    made = plan(WEB, SLICE)
    sets = BACKENDS["nftables"].render(made).table().sets
    counting = {name for name, one in sets.items() if isinstance(one, Set) and one.counter}
    assert counted_sets(made, True).keys() == counting
    assert counted_sets(made, False).keys() == {"services", "nodeport-services"}


def save(*lines):
    return "\n".join(["*nat", ":PREROUTING ACCEPT [1:60]", *lines, "COMMIT", ""])


def test_the_rule_that_sends_counts_in_iptables_mode():
    made = plan(WEB, SLICE)
    ends = made.services[NAME].cluster.endpoints
    one, two = (names.sep(NAME, end) for end in ends)
    text = save(
        f'[9:540] -A {one} -s 10.64.1.5/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ',
        f'[3:180] -A {one} -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.64.1.5:8080',
        f'[2:120] -A {two} -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.64.2.5:8080',
        "[8:480] -A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m tcp -j DNAT --to-destination 10.64.9.9:80",
        "[5:300] -A CNI-DN-1 -p tcp -j DNAT --to-destination 10.64.9.9:80",
    )
    found = set(XtablesCounterOwners(made).counted(text))
    assert found == {
        ConnectionCount((one, "endpoint"), NAME, ("10.64.1.5", 8080), 3),
        ConnectionCount((one, "service"), NAME, None, 3),
        ConnectionCount((two, "endpoint"), NAME, ("10.64.2.5", 8080), 2),
        ConnectionCount((two, "service"), NAME, None, 2),
    }


@pytest.mark.row("19.8", "20.18")
def test_the_rule_against_invalid_packets_counts_what_it_drops():
    text = "*filter\n"
    text += "[7:420] -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n"
    text += "[9:540] -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n"
    text += "[5:300] -A FORWARD -m conntrack --ctstate INVALID -j DROP\nCOMMIT\n"
    assert invalid_dropped(text) == 7
    assert invalid_dropped("*filter\nCOMMIT\n") == 0


@pytest.mark.parametrize("comment", ['-j DNAT "', "[5:1] -A KUBE-SEP-"])
def test_a_comment_of_a_stranger_is_no_rule(comment):
    made = plan(WEB, SLICE)
    text = save(f'[5:300] -A FOREIGN -m comment --comment "{comment}" -j ACCEPT')
    assert list(XtablesCounterOwners(made).counted(text)) == []
