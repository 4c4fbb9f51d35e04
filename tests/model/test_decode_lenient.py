"""What kube-proxy bears with, because an API server may have stored it. Rows are those of the behaviours checklist."""

import datetime

import pytest
from tests.model.bases import NODE, POD, SERVICE, SLICE, changed

from narthex.model.decode.objects import decode
from narthex.model.net import IPFamily


def good(raw, *warned):
    decoded = decode(raw)
    assert decoded.object is not None, decoded.problems
    assert [(problem.severity, problem.field) for problem in decoded.problems] == [
        ("warning", field) for field in warned
    ]
    return decoded.object


def test_zero_padded_octets_are_decimal():
    """Row 1.13."""
    assert good(changed(SERVICE, "spec/clusterIP", "010.110.000.001")).cluster_ips == ("10.110.0.1",)
    assert good(changed(SERVICE, "spec/externalIPs", ["203.000.113.010"])).external_ips == ("203.0.113.10",)
    assert good(changed(SERVICE, "spec/loadBalancerSourceRanges", ["010.0.0.0/8"])).source_ranges == ("10.0.0.0/8",)
    assert good(changed(SLICE, "endpoints/0/addresses", ["010.064.001.005"])).endpoints[0].address == "10.64.1.5"
    assert good(changed(NODE, "spec/podCIDR", "010.64.1.0/24")).pod_cidrs == ("10.64.1.0/24",)


def test_more_addresses_in_one_endpoint():
    """Row 2.6: the first counts; an endpoint without any is skipped."""
    assert good(changed(SLICE, "endpoints/0/addresses", ["10.64.1.5", "10.64.1.6"])).endpoints[0].address == "10.64.1.5"
    assert good(changed(SLICE, "endpoints/0/addresses", []), "endpoints[0].addresses").endpoints == ()


@pytest.mark.parametrize("conditions", [None, {}, {"ready": None, "serving": None, "terminating": None}])
def test_absent_conditions(conditions):
    """Row 2.7."""
    endpoint = good(changed(SLICE, "endpoints/0/conditions", conditions)).endpoints[0]
    assert (endpoint.ready, endpoint.serving, endpoint.terminating) == (True, True, False)


def test_source_ranges():
    """Row 10.10: white space is trimmed, what does not parse is left out."""
    raw = changed(SERVICE, "spec/loadBalancerSourceRanges", [" 198.51.100.0/24 ", "198.51.100.0", "fd00::/64"])
    made = good(raw, "spec.loadBalancerSourceRanges[1]")
    assert made.source_ranges == ("198.51.100.0/24", "fd00::/64")
    raw = changed(SERVICE, "spec/loadBalancerSourceRanges", ["bad"])
    assert good(raw, "spec.loadBalancerSourceRanges[0]").source_ranges == ()


def test_fqdn_slices_are_read_and_belong_to_no_family():
    """Row 2.3."""
    raw = changed(changed(SLICE, "addressType", "FQDN"), "endpoints/0/addresses", ["db.example.com"])
    assert good(raw).family is None


def test_slices_without_ports_or_service():
    for absent in (None, []):
        assert good(changed(SLICE, "ports", absent)).ports == ()
        assert good(changed(SLICE, "endpoints", absent)).endpoints == ()
    assert good(changed(SLICE, "metadata/labels", None)).service_name == ""


def test_external_name_with_leftovers():
    """Row 1.2: an address may be left from before the type was changed."""
    raw = changed(changed(SERVICE, "spec/type", "ExternalName"), "spec/externalName", "db.example.com.")
    made = good(raw)
    assert (made.external_name, made.cluster_ips) == ("db.example.com", ("10.110.0.1",))
    assert good(changed(raw, "spec/ports", None)).ports == ()


def test_headless():
    """Row 1.1."""
    made = good(changed(changed(SERVICE, "spec/clusterIP", "None"), "spec/ports", None))
    assert made.headless and made.ports == ()
    assert good(changed(changed(SERVICE, "spec/clusterIP", "None"), "spec/ipFamilies", ["IPv6"])).ip_families == (
        IPFamily.IPV6,
    )


def test_no_address_yet():
    for absent in (None, ""):
        assert good(changed(SERVICE, "spec/clusterIP", absent)).cluster_ips == ()
    raw = changed(changed(SERVICE, "spec/clusterIP", ""), "spec/ipFamilies", ["IPv4", "IPv6"])
    assert good(raw).ip_families == (IPFamily.IPV4, IPFamily.IPV6)


def test_families_are_not_made_up():
    """Row 1.4: without `ipFamilies` only the first cluster IP counts, by its own family; that is the planner's to say."""
    assert good(SERVICE).ip_families == ()
    raw = changed(changed(SERVICE, "spec/clusterIPs", ["10.110.0.1", "fd6e::1"]), "spec/ipFamilies", ["IPv4"])
    assert good(raw).ip_families == (IPFamily.IPV4,)


def test_node_port_left_from_another_type():
    assert good(changed(SERVICE, "spec/ports/0/nodePort", 30080), "spec.ports[0].nodePort").ports[0].node_port == 0
    raw = changed(changed(SERVICE, "spec/ports/0/nodePort", 30080), "spec/type", "NodePort")
    assert good(raw).ports[0].node_port == 30080


def test_target_port_of_zero_is_the_port():
    for nothing in (0, "", None):
        assert good(changed(SERVICE, "spec/ports/0/targetPort", nothing)).ports[0].target_port is None


def test_one_number_for_two_protocols():
    """Row 1.6."""
    raw = changed(SERVICE, "spec/ports", [{"name": "tcp", "port": 53}, {"name": "udp", "port": 53, "protocol": "UDP"}])
    assert len(good(raw).ports) == 2


def test_affinity():
    raw = changed(SERVICE, "spec/sessionAffinity", "ClientIP")
    assert good(raw).affinity_seconds == 10800
    for seconds, fine in [(1, True), (86400, True), (0, False), (86401, False), (-1, False)]:
        decoded = decode(changed(raw, "spec/sessionAffinityConfig", {"clientIP": {"timeoutSeconds": seconds}}))
        assert (decoded.object is not None) == fine
    alone = changed(SERVICE, "spec/sessionAffinityConfig", {"clientIP": {"timeoutSeconds": 5}})
    assert decode(alone).problems[0].field == "spec.sessionAffinityConfig"


def test_a_bad_balancer_address_does_not_take_the_service_down():
    raw = changed(
        SERVICE, "status", {"loadBalancer": {"ingress": [{"ip": "bad"}, {"ip": "127.0.0.1"}, {"ip": "203.0.113.1"}]}}
    )
    made = good(raw, "status.loadBalancer.ingress[0].ip", "status.loadBalancer.ingress[1].ip")
    assert [entry.ip for entry in made.ingress] == ["203.0.113.1"]


def test_a_bad_node_address_does_not_take_the_node_down():
    raw = changed(NODE, "status", {"addresses": [{"type": "InternalIP", "address": "bad"}]})
    assert good(raw, "status.addresses[0].address").internal_ips == ()


def test_words_of_newer_servers():
    assert (
        good(
            changed(SERVICE, "spec/trafficDistribution", "PreferMoon"), "spec.trafficDistribution"
        ).traffic_distribution
        == ""
    )
    assert good(changed(SERVICE, "spec/newField", {"a": 1})).name == "web"
    assert good(changed(SERVICE, "metadata/name", "9web")).name == "9web"


def test_null_is_absent():
    raw = changed(changed(SERVICE, "status", None), "metadata/labels", None)
    for field in ("type", "selector", "externalIPs", "sessionAffinity", "externalTrafficPolicy", "ipFamilies"):
        raw = changed(raw, f"spec/{field}", None)
    made = good(raw)
    assert (made.type, made.selector, made.affinity_seconds) == ("ClusterIP", (), None)


def test_default_namespace():
    for absent in (None, ""):
        assert good(changed(SERVICE, "metadata/namespace", absent)).namespace == "default"
    assert good(NODE).namespace == ""


def test_a_date_that_a_yaml_reader_made():
    raw = changed(POD, "metadata/deletionTimestamp", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    assert good(raw).deletion_timestamp.startswith("2026-01-01")
