"""Endpoints of a slice are looked at all at once where that can be: what comes out is what each alone would give."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.decode.objects import decode_shape
from narthex.model.net import IPFamily
from narthex.model.validate import DNS_SUBDOMAIN, are_plain_hosts, are_subdomains, is_plain_host
from narthex.model.wire import WireConditions, WireEndpoint, WireEndpointSlice, WireMeta, WireReference

names = st.one_of(
    st.sampled_from(
        ["web-0", "a.b", "", "a\nb", "-", "a..b", "A", "web-\n", "a" * 253, "a" * 254, "x\u00e9", "a b", "\n"]
    ),
    st.from_regex(r"[a-z0-9.\-\n]{1,8}", fullmatch=True),
)
addresses = st.one_of(
    st.sampled_from(
        ["10.64.1.1", "010.64.1.1", "127.0.0.1", "224.0.0.1", "0.0.0.0", "10.64.1", "fd64::1", "10.64.1.1\n"]
    ),
    st.ip_addresses(v=4).map(str),
)
few = st.lists(names, min_size=1, max_size=4)


@given(few)
def test_names_are_sound_together_when_each_is(texts):
    assert are_subdomains(texts) == all(map(DNS_SUBDOMAIN.holds, texts))


@given(st.lists(addresses, min_size=1, max_size=4), st.sampled_from(IPFamily))
def test_addresses_are_ordinary_together_when_each_is(texts, family):
    assert are_plain_hosts(texts, family) == all(is_plain_host(text, family) for text in texts)


def entry(address="10.64.1.1", pod="web-0", node="worker-a", zone="", **fields):
    return WireEndpoint(
        addresses=[address],
        nodeName=node or None,
        zone=zone or None,
        targetRef=WireReference(kind="Pod", name=pod),
        conditions=WireConditions(ready=True, serving=True, terminating=False),
        **fields,
    )


def decoded(*endpoints):
    meta = WireMeta(name="web-1", namespace="shop", labels={"kubernetes.io/service-name": "web"})
    return decode_shape(
        WireEndpointSlice(metadata=meta, addressType="IPv4", endpoints=list(endpoints)), "EndpointSlice"
    )


def test_an_endpoint_at_the_broadcast_address_is_ignored():
    """The API server accepts it. The others of its slice are good."""
    found = decoded(entry("10.64.1.1"), entry("255.255.255.255"), entry("10.64.1.2"))
    assert [each.address for each in found.object.endpoints] == ["10.64.1.1", "10.64.1.2"]
    (problem,) = found.problems
    assert problem.severity == "warning" and problem.field == "endpoints[1].addresses[0]"


@given(st.lists(st.builds(entry, address=addresses, pod=names, node=names, zone=names), min_size=1, max_size=3))
def test_all_at_once_is_one_by_one(endpoints):
    """The one with a host name keeps the others from being looked at together."""
    at_once, one_by_one = decoded(*endpoints), decoded(*endpoints, entry("10.99.0.1", hostname="web-9"))
    assert at_once.problems == one_by_one.problems
    if at_once.object is None:
        assert one_by_one.object is None
    else:
        assert at_once.object.endpoints == one_by_one.object.endpoints[:-1]


@pytest.mark.parametrize("field", ["nodeName", "zone", "targetRef"])
def test_a_line_break_makes_two_names_of_none(field):
    bad = entry()
    value = WireReference(kind="Pod", name="web-0\nweb-1") if field == "targetRef" else "a\nb"
    setattr(bad, field, value)
    got = decoded(entry("10.64.1.2"), bad)
    assert [each.address for each in got.object.endpoints] == ["10.64.1.2", bad.addresses[0]]
    assert "\\n" not in repr(got.object)
    assert any(field in problem.field for problem in got.problems)
    assert "\n" not in msgspec.json.encode([str(problem) for problem in got.problems]).decode()
