"""Who answers for an address, and for every other node why it does not (rows A1-A5, A9, A10)."""

from hashlib import sha256

import pytest

from narthex.lb.election import EXCLUDE, AnnouncementReason, ElectionInput, NodeAnnouncerState, elect, rank
from narthex.lb.heartbeat import PeerState
from narthex.model.objects import IPAddressPool, L2Advertisement, LoadBalancerIngress, Node
from narthex.model.selector import Requirement
from narthex.testing.build import endpoint, endpoint_slice, name, service, snapshot

NODES = ("a", "b", "c")
IP, SIX = "192.0.2.7", "2001:db8::7"
POOL = IPAddressPool(name="lan", namespace="metallb-system", addresses=("192.0.2.0/28", "2001:db8::/120"))


def balancer(text="shop/web", *addresses, **fields):
    return service(text, "10.110.0.1", type="LoadBalancer", balancers=addresses or (IP,), **fields)


def backed(text="shop/web", *nodes, **conditions):
    ends = [endpoint(f"10.64.1.{place}", node=node, **conditions) for place, node in enumerate(nodes or NODES, 1)]
    return endpoint_slice(text, *ends)


def advertisement(**fields):
    return L2Advertisement(name="all", namespace="metallb-system", **fields)


def nodes(**special):
    return [Node(name=each, **special.get(each, {})) for each in NODES]


def labelled(**labels):
    return {"labels": tuple(sorted(labels.items()))}


def view(*objects, announcers=None, **fields):
    objects = objects if any(isinstance(each, Node) for each in objects) else (*objects, *nodes())
    objects = objects if any(isinstance(each, IPAddressPool) for each in objects) else (*objects, POOL)
    alive = {each: NodeAnnouncerState() for each in NODES}
    return ElectionInput(snapshot=snapshot(*objects), announcers=alive if announcers is None else announcers, **fields)


def reasons(decision):
    return {each.node: each.reason for each in decision.verdicts}


def order(address, among=NODES):
    return tuple(sorted(among, key=lambda node: sha256(f"{node}#{address}".encode()).digest()))


def test_the_order_is_metallbs():
    assert rank("worker-a", IP) == sha256(b"worker-a#192.0.2.7").digest()
    decision = elect(view(balancer(), backed(), advertisement()))[IP]
    first, *others = order(IP)
    assert decision.order == order(IP) and decision.holder == first
    assert reasons(decision)[first] is AnnouncementReason.ANNOUNCES
    for place, other in enumerate(others, 2):
        assert decision.verdict(other).reason is AnnouncementReason.ELECTION_LOST
        assert decision.verdict(other).text == f"{first} has it; {place}. of 3 by the hash of node and {IP}"
    assert decision.pool == "lan" and decision.notes == () and decision.interfaces is None


def test_both_families_of_a_service_are_on_one_node():
    found = elect(view(balancer("shop/web", IP, SIX), backed(), advertisement()))
    assert found[IP].order == found[SIX].order == order(IP)


def test_addresses_of_others_and_of_other_types_are_left_alone():
    told = (LoadBalancerIngress(ip=IP, proxy=True),)
    proxied = service("shop/proxied", "10.110.0.1", type="LoadBalancer")
    objects = [type(proxied)(**{**{f: getattr(proxied, f) for f in proxied.__struct_fields__}, "ingress": told})]
    objects.append(service("shop/plain", "10.110.0.2", balancers=(IP,)))
    assert elect(view(*objects)) == {}


def test_a_pool_without_an_advertisement_is_announced_and_that_is_said():
    decision = elect(view(balancer(), backed()))[IP]
    assert decision.holder == order(IP)[0]
    assert decision.notes == ("no L2Advertisement selects pool lan: it is announced on all links of all nodes",)


def test_an_address_in_no_pool():
    decision = elect(view(balancer("shop/web", "198.51.100.9"), backed()))["198.51.100.9"]
    assert set(reasons(decision).values()) == {AnnouncementReason.NOT_IN_A_POOL} and decision.holder == ""


def test_a_pool_that_is_refused_takes_no_address_away():
    broken = IPAddressPool(name="lan", namespace="metallb-system", addresses=("192.0.2.0/28", "nonsense"))
    given = balancer(annotations=(("metallb.io/ip-allocated-from-pool", "lan"),))
    assert elect(view(given, backed(), broken))[IP].holder == order(IP)[0]
    assert elect(view(balancer(), backed(), broken))[IP].holder == ""


@pytest.mark.parametrize(
    ("special", "announcers", "reason", "said"),
    [
        ({"network_unavailable": True}, None, AnnouncementReason.NETWORK_UNAVAILABLE, "NetworkUnavailable"),
        ({"ready": False}, None, AnnouncementReason.NOT_READY, "not Ready"),
        (labelled(**{EXCLUDE: ""}), None, AnnouncementReason.EXCLUDED, EXCLUDE),
        ({}, NodeAnnouncerState(state=PeerState.UNHEARD), AnnouncementReason.NO_ANNOUNCER, "no heartbeat from"),
        ({}, NodeAnnouncerState(state=PeerState.LOST), AnnouncementReason.NODE_LOST, "timed out"),
        ({}, NodeAnnouncerState(state=PeerState.LEFT), AnnouncementReason.LEAVING, "has ended"),
        ({}, NodeAnnouncerState(leaving=True), AnnouncementReason.LEAVING, "shutting down"),
        ({}, NodeAnnouncerState(links=()), AnnouncementReason.NO_INTERFACE, "no broadcast link of"),
    ],
)
def test_what_keeps_the_first_node_out(special, announcers, reason, said):
    first, second, _ = order(IP)
    alive = {each: NodeAnnouncerState() for each in NODES} | ({first: announcers} if announcers else {})
    decision = elect(view(balancer(), backed(), *nodes(**{first: special}), announcers=alive))[IP]
    assert decision.holder == second
    assert decision.verdict(first).reason is reason and said in decision.verdict(first).text


@pytest.mark.parametrize("special", [{"ready": False}, labelled(**{EXCLUDE: ""})])
def test_what_would_leave_nobody_is_ignored_and_said(special):
    decision = elect(view(balancer(), backed(), advertisement(), *nodes(a=special, b=special, c=special)))[IP]
    assert decision.order == order(IP)
    assert "ignored" in decision.notes[0]
    # Not so when another could answer, be it only the last one.
    *_, last = order(IP)
    kept = {each: special for each in NODES if each != last}
    assert elect(view(balancer(), backed(), advertisement(), *nodes(**kept)))[IP].order == (last,)


def test_the_exclude_label_can_be_ignored_for_good():
    told = nodes(**{order(IP)[0]: labelled(**{EXCLUDE: ""})})
    assert elect(view(balancer(), backed(), *told, ignore_exclude_label=True))[IP].order == order(IP)


def test_node_selectors():
    chosen = advertisement(node_selectors=((Requirement("edge", "exists"),),))
    decision = elect(view(balancer(), backed(), chosen, *nodes(b=labelled(edge=""))))[IP]
    assert decision.order == ("b",)
    assert (
        reasons(decision)["a"] is AnnouncementReason.NODE_SELECTOR
        and "all do not select Node a" in decision.verdict("a").text
    )


def test_interfaces_and_a_node_that_lacks_them():
    first, second, third = order(IP)
    chosen = advertisement(interfaces=("eth1", "eth2"))
    alive = {
        first: NodeAnnouncerState(links=("eth0",)), second: NodeAnnouncerState(links=("eth0", "eth2")), third: NodeAnnouncerState(links=("eth1",))
    }  # fmt: skip
    decision = elect(view(balancer(), backed(), chosen, announcers=alive))[IP]
    assert decision.order == (second, third) and decision.interfaces == ("eth1", "eth2")
    assert decision.verdict(first).text == f"only eth1, eth2 may be used; {first} has eth0"
    anywhere = L2Advertisement(name="too", namespace="metallb-system")
    assert elect(view(balancer(), backed(), chosen, anywhere, announcers=alive))[IP].interfaces is None


def test_service_selectors():
    chosen = advertisement(service_selectors=((Requirement("tier", "in", ("front",)),),))
    decision = elect(view(balancer(), backed(), chosen))[IP]
    assert set(reasons(decision).values()) == {AnnouncementReason.NOT_SELECTED}
    assert "serviceSelectors" in decision.verdict("a").text
    assert elect(view(balancer(labels=(("tier", "front"),)), backed(), chosen))[IP].holder
    # Of two that share the address one is enough: the address is announced or it is not.
    other = balancer("shop/other", labels=(("tier", "front"),))
    both = elect(view(balancer(), other, backed(), backed("shop/other"), chosen))[IP]
    assert both.holder and both.services == (name("shop/other"), name("shop/web"))


@pytest.mark.parametrize(
    ("conditions", "serves"),
    [
        ({"ready": True}, True),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False}, False),
    ],
)
def test_an_endpoint_that_can_serve_is_needed(conditions, serves):
    decision = elect(view(balancer(), backed("shop/web", "a", **conditions)))[IP]
    assert bool(decision.holder) is serves
    if not serves:
        assert set(reasons(decision).values()) == {AnnouncementReason.NO_ENDPOINT}
        assert decision.verdict("b").text == "no endpoint of shop/web can serve"
    assert not elect(view(balancer()))[IP].holder


def test_endpoints_of_a_node_that_is_gone_are_gone():
    def announcers(**fields):
        return {
            "a": NodeAnnouncerState(state=PeerState.LOST, **fields),
            "b": NodeAnnouncerState(),
            "c": NodeAnnouncerState(),
        }

    gone = announcers(node_gone=True)
    decision = elect(view(balancer(), backed("shop/web", "a"), announcers=gone))[IP]
    assert decision.holder == "" and decision.verdict("b").text.endswith("those on a are gone with the node")
    assert elect(view(balancer(), backed("shop/web", "a", "b"), announcers=gone))[IP].holder in ("b", "c")
    # Only the announcer has died: the pods there serve on.
    assert elect(view(balancer(), backed("shop/web", "a"), announcers=announcers()))[IP].holder in ("b", "c")


def test_local_policy():
    decision = elect(view(balancer(external_policy_local=True), backed("shop/web", "c")))[IP]
    assert decision.order == ("c",)
    assert decision.verdict("a").reason is AnnouncementReason.NO_LOCAL_ENDPOINT
    assert "no endpoint of shop/web is on a" in decision.verdict("a").text


def shared(*where):
    """Two Services on one address, the second one Local, with endpoints on these nodes each."""
    one, two = where
    local = balancer("shop/two", external_policy_local=True)
    first = balancer("shop/one", external_policy_local=True)
    return view(first, local, backed("shop/one", *one), backed("shop/two", *two))


def test_sharers_are_served_by_one_node_that_has_endpoints_of_all():
    decision = elect(shared("ab", "bc"))[IP]
    assert decision.order == ("b",) and decision.notes[1:] == ()
    assert decision.verdict("a").reason is AnnouncementReason.SHARED_ELSEWHERE
    assert "shop/two shares the address" in decision.verdict("a").text


def test_sharers_without_a_common_node():
    decision = elect(shared("a", "c"))[IP]
    assert decision.holder in ("a", "c")
    unserved = "shop/two" if decision.holder == "a" else "shop/one"
    assert "no node has local endpoints of all Services that share the address" in decision.notes
    assert any(note.startswith(f"{unserved} is not served") for note in decision.notes)
    # A node that serves none of them is no better than nobody.
    assert decision.verdict("b").reason is AnnouncementReason.NO_LOCAL_ENDPOINT


def test_a_cluster_sharer_is_served_where_the_local_one_is():
    local = balancer("shop/local", external_policy_local=True)
    both = (balancer("shop/any"), local, backed("shop/any"))
    assert elect(view(*both, backed("shop/local", "c")))[IP].order == ("c",)
    # The one without endpoints does not keep the other from being served.
    assert elect(view(*both))[IP].order == order(IP)


def test_who_stands_back_comes_last():
    first, second, third = order(IP)
    alive = {first: NodeAnnouncerState(standing_back=True), second: NodeAnnouncerState(), third: NodeAnnouncerState()}
    assert elect(view(balancer(), backed(), announcers=alive))[IP].order == (second, third, first)
    alone = {first: NodeAnnouncerState(standing_back=True)}
    assert elect(view(balancer(), backed(), announcers=alone))[IP].holder == first


def test_an_announcer_without_a_node_object_counts():
    found = elect(view(balancer(), backed("shop/web", "z"), announcers={"z": NodeAnnouncerState()}))[IP]
    assert found.holder == "z" and reasons(found)["a"] is AnnouncementReason.NO_ANNOUNCER
