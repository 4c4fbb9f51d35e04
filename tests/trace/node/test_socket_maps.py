"""Socket maps of other programs are named and not explained."""

import pytest

from narthex.model.net import IPFamily
from narthex.trace.node.socket_maps import CILIUM_MAPS, foreign_socket_maps
from narthex.trace.node.view import view_of_files

RULES = "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n"
TYPED = """[{
        "key": {"address": 167772161, "dport": 20480, "backend_slot": 1, "proto": 6, "scope": 0, "pad": [0,0]},
        "value": {"backend_id": 7, "count": 0, "rev_nat_index": 3, "flags": 0, "flags2": 0, "qcount": 0}
    }
]
"""
RAW = "key: 0a 60 00 01 00 50 01 00 06 00 00 00  value: 07 00 00 00 00 00 00 03 00 00 00 00\nFound 1 element\n"
SHOWN = "17: hash  name cilium_lb4_serv  flags 0x1\n        key 12B  value 12B  max_entries 65536  memlock 1835008B\n"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("cilium_lb4_services_v2.txt", RAW, ("cilium_lb4_services_v2",)),
        ("cilium_lb4_backends_v3.json", TYPED, ("cilium_lb4_backends_v3",)),
        ("dump.json", TYPED, ("cilium_lb4_services_v2 or cilium_lb6_services_v2",)),
        ("maps.txt", SHOWN, ("cilium_lb4_services_v2",)),
        ("maps.txt", SHOWN.replace("lb4_serv", "lb4_reve"), ("cilium_lb4_reverse_nat", "cilium_lb4_reverse_sk")),
        ("maps.txt", "# bpftool map dump pinned /sys/fs/bpf/tc/globals/cilium_skip_lb6\n" + RAW, ("cilium_skip_lb6",)),
        ("maps.txt", RAW, ()),
        ("nat.txt", RULES, ()),
        ("names.txt", "cilium_lb4_unheard_of cilium_ct4_global nx_fronts4", ()),
    ],
)
def test_maps_of_cilium_have_names(file, text, expected):
    assert foreign_socket_maps(file, text) == expected


def test_names_that_bpftool_cuts_are_told_apart_as_far_as_possible():
    for name in CILIUM_MAPS:
        assert name in foreign_socket_maps("maps.txt", f"1: hash  name {name[:15]}  flags 0x0\n")


def test_a_view_names_them_beside_rules_and_alone():
    for files in ([("nat.txt", RULES), ("cilium_lb4_services_v2.txt", RAW)], [("cilium_lb4_services_v2.txt", RAW)]):
        view = view_of_files(files)
        (message,) = view.partial
        assert "socket load balancing of Cilium (cilium_lb4_services_v2)" in message
        assert "is not explained" in message
        assert view.sockets is None
    assert IPFamily.IPV4 in view_of_files([("nat.txt", RULES)]).rules
