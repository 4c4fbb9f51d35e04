"""No address and no node port is two Services', whatever is asked for, let go and asked for again."""

import ipaddress

from hypothesis import given
from hypothesis import strategies as st
from tests.lab.controllers.world import World, service

from narthex.lab.api.errors import StatusError
from narthex.lab.controllers.service.allocator import NODE_PORTS
from narthex.lab.topology import SERVICE_CIDRS

PORTS = st.lists(
    st.fixed_dictionaries(
        {"port": st.sampled_from([53, 80]), "protocol": st.sampled_from(["TCP", "UDP"])},
        optional={"nodePort": st.sampled_from([30001, 30002, 80])},
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda port: (port["port"], port["protocol"]),
)
SPECS = st.fixed_dictionaries(
    {"type": st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]), "ports": PORTS},
    optional={
        "clusterIP": st.sampled_from(["None", "10.96.0.5", "fd00:10:96::5", "192.0.2.1"]),
        "ipFamilyPolicy": st.sampled_from(["SingleStack", "PreferDualStack", "RequireDualStack"]),
        "ipFamilies": st.sampled_from([["IPv4"], ["IPv6"], ["IPv6", "IPv4"]]),
        "externalTrafficPolicy": st.sampled_from(["Local", "Cluster"]),
    },
)
STEPS = st.tuples(st.sampled_from(["put", "put", "patch", "delete"]), st.sampled_from("abcd"), SPECS)


def claims(obj):
    spec = obj["spec"]
    yield from (address for address in spec.get("clusterIPs") or () if address != "None")
    yield from {(port["protocol"], port["nodePort"]) for port in spec["ports"] if "nodePort" in port}
    if "healthCheckNodePort" in spec:
        yield "TCP", spec["healthCheckNodePort"]


@given(st.lists(STEPS, max_size=25))
def test_nothing_is_given_twice(steps):
    world = World(nodes=0)
    for step, name, spec in steps:
        before = world.list("Service")
        try:
            if step == "delete":
                world.delete("Service", name)
            elif step == "patch":
                if world.get("Service", name) is not None:
                    world.patch("Service", name, **{field: spec[field] for field in ("type", "ports")})
            else:
                world.put(service(name, **spec))
        except StatusError as fault:
            assert fault.code in (404, 422)
            assert world.list("Service") == before
        services = world.list("Service")
        given_ = [claim for each in services for claim in claims(each)]
        assert len(given_) == len(set(given_))
        for each in services:
            check(each)


def check(obj):
    """It has all that its type has, and nothing that its type has not."""
    spec = obj["spec"]
    if spec["type"] == "ExternalName":
        assert not {"clusterIP", "clusterIPs", "ipFamilies"} & spec.keys()
    elif spec["clusterIP"] != "None":
        assert [family(address) for address in spec["clusterIPs"]] == spec["ipFamilies"]
        assert spec["clusterIP"] == spec["clusterIPs"][0]
        dual = spec["ipFamilyPolicy"] != "SingleStack"
        assert len(spec["clusterIPs"]) == (2 if dual else 1)
        for address in spec["clusterIPs"]:
            assert any(
                ipaddress.ip_address(address) in network
                for network in map(ipaddress.ip_network, SERVICE_CIDRS)
                if family(address) == f"IPv{network.version}"
            )
    has = spec["type"] in ("NodePort", "LoadBalancer")
    assert all((port.get("nodePort") in NODE_PORTS) if has else "nodePort" not in port for port in spec["ports"])


def family(address):
    return "IPv6" if ":" in address else "IPv4"
