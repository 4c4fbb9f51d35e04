"""Certificates hold, and the checker refuses those that were changed."""

import json

import msgspec
import pytest
from tests.trace.proof.own_rules import MODES, partitions_of

from narthex.model import IPFamily, ServiceCIDR
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.proof.certificate import certificate
from narthex.trace.proof.checker import CertificateError, check_certificate

SHOP = (
    service("shop/web", "10.110.0.5", "fd6e::5", node_port=30080, affinity_seconds=60),
    endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"), port=8080),
    endpoint_slice("shop/web", endpoint("fd64:0:0:1::10"), port=8080, suffix="2"),
    service("shop/empty", "10.110.0.7", "fd6e::7"),
    ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16",)),
)


def certificates(mode="nftables", family=IPFamily.IPV4):
    found = partitions_of(mode, plan(*SHOP, family=family))
    return [msgspec.json.encode(certificate(each, found.space)) for each in (found.rules, found.plan)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", IPFamily)
def test_the_classes_are_disjoint_and_are_all_packets(mode, family):
    for text in certificates(mode, family):
        checked = check_certificate(text)
        assert checked.packets == 1 << checked.bits
        assert checked.bits == 2 * family.host_bits + 56
        assert checked.classes >= 9


def changed(change):
    held = json.loads(certificates()[0])
    change(held)
    return json.dumps(held)


def first_edge(held):
    return next(node for node in held["nodes"] if len(node["edges"]) > 1)["edges"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["nodes"][-1]["edges"].pop(),
        lambda held: held["nodes"][-1]["edges"].append(held["nodes"][-1]["edges"][0]),
        lambda held: first_edge(held)[0][0].__setitem__(1, f"{int(first_edge(held)[0][0][1], 16) + 1:x}"),
        lambda held: held["ends"][0][0].__setitem__("probability", [1, 7]),
        lambda held: held["ends"][0].append(held["ends"][0][0]),
        lambda held: held["nodes"][-1]["edges"][-1][0].pop(),
        lambda held: held["nodes"][-1]["edges"][0][0].append(held["nodes"][-1]["edges"][1][0][0]),
        lambda held: held["nodes"][-1].__setitem__("field", 5),
        lambda held: held["fields"][0].__setitem__("bits", 31),
        lambda held: held["nodes"].clear(),
        lambda held: held.pop("ends"),
    ],
    ids=["lost", "twice", "wider", "probability", "weights", "gap", "overlap", "field", "bits", "empty", "foreign"],
)
def test_a_changed_certificate_is_refused(change):
    with pytest.raises(CertificateError):
        check_certificate(changed(change))
