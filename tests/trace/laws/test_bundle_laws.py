"""Whatever stands in a bundle, it is read or said to be unreadable, and a packet's journey adds up to one."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.cli.output import json_text
from narthex.model.store import Snapshot
from narthex.trace.document import trace_document
from narthex.trace.node.layout import BundleManifest
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.places import TraceError
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel
from narthex.trace.render.text import text

WORDS = st.sampled_from(
    ["eth0", "cni0", "lo", "10.0.0.1", "10.0.0.0/24", "10.96.0.9", "default", "fd00::1", "main", "local", "unicast", "blackhole",
     "vxlan", "bridge", "02:00:00:00:00:01", "UP", "REACHABLE", "0x10", "-1", "", "\x1b[31m", "77"]
)  # fmt: skip
KEYS = st.sampled_from(
    ["dst", "dev", "gateway", "type", "table", "nexthops", "metric", "flags", "ifname", "ifindex", "linkinfo", "info_kind", "info_data",
     "id", "local", "addr_info", "prefixlen", "priority", "src", "srclen", "fwmark", "mac", "lladdr", "state", "master", "mtu"]
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(WORDS, st.integers(-5, 70_000), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=6)),
    max_leaves=12,
)
LISTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=7), max_size=5).map(json.dumps)
NET = (
    "links.json",
    "addresses.json",
    "routes-4.json",
    "routes-6.json",
    "policies-4.json",
    "neighbours.json",
    "fdb.json",
)
PARTS = st.dictionaries(st.sampled_from([f"net/{name}" for name in NET]), st.one_of(LISTS, st.text(max_size=20)))
TEXTS = st.fixed_dictionaries(
    {},
    optional={
        "net/sysctls.txt": st.lists(
            st.sampled_from(["net.ipv4.ip_forward", "net.ipv4.conf.all.rp_filter", "net.ipv4.conf.eth0.rp_filter", "x"]).flatmap(
                lambda name: st.sampled_from(["0", "1", "2", "x", ""]).map(lambda value: f"{name} = {value}\n")
            )
        ).map("".join),
        "net/conntrack-4.txt": st.sampled_from(
            ["tcp 6 9 ESTABLISHED src=10.0.0.9 dst=10.96.0.9 sport=1 dport=80 src=10.1.0.7 dst=10.0.0.9 sport=8080 dport=1\n", "tcp src=\n"]
        ),
        "rules/iptables-nft.txt": st.sampled_from(
            ["*nat\n-A PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.7:8080\nCOMMIT\n", "*nat\n", "\0"]
        ),
    },
)  # fmt: skip


@settings(max_examples=60)
@given(
    PARTS, TEXTS, st.sampled_from(["outside", "10.0.0.1", "10.1.0.9"]), st.sampled_from(["10.96.0.9:80", "10.0.0.1:22"])
)
def test_any_bundle_gives_a_journey_or_a_question_that_cannot_be_asked(parts, texts, source, destination) -> None:
    view = view_of_bundle({**parts, **texts}, BundleManifest(node="node-1", writer="law"), "law")
    try:
        journey = travel(
            KnownCluster(views=(view,), snapshot=Snapshot()), TraceRequest(source=source, destination=destination)
        )
    except TraceError:
        return
    assert sum(leaf.probability for leaf in journey.leaves()) == 1
    json_text(trace_document(journey))
    said = text(journey, every=True)
    assert "\x1b" not in said
