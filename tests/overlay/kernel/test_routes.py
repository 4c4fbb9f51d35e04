"""Routes that take the place of others."""

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model.net import FAMILIES
from narthex.overlay.changes import OverlayState, plan_changes
from narthex.overlay.desired import DesiredState, OverlayRoute
from narthex.overlay.kernel.kernel import OverlayKernel

pytestmark = pytest.mark.kernel
NAME = "nx-overlay-routes"


@pytest.mark.parametrize(
    ("subnet", "peer", "gateway"),
    [("10.244.3.0/24", "192.168.49.13", "10.244.3.0"), ("fd00:10:244:3::/64", "fd00:192:168:49::d", "fd00:10:244:3::")],
)
def test_a_peer_returns_from_host_gw_to_vxlan(subnet, peer, gateway):
    create_namespace(NAME)
    try:
        for command in (
            "link add eth0 type veth peer name eth1",
            "address add 192.168.49.11/24 dev eth0",
            "address add fd00:192:168:49::b/64 dev eth0 nodad",
            "link set eth0 up",
            "link set eth1 up",
            "link add tunnel type vxlan id 1 dev eth0 dstport 8472",
            "link set tunnel up",
            f"route add {subnet} via {peer} dev eth0",
        ):
            run(["ip", *command.split()], namespace=NAME)
        with in_namespace(NAME):
            kernel = OverlayKernel()
            try:
                old = OverlayRoute(subnet, peer, "eth0")
                desired = DesiredState(routes=frozenset({OverlayRoute(subnet, gateway, "tunnel", onlink=True)}))
                kernel.apply(plan_changes(desired, OverlayState(routes=frozenset({old})), (), frozenset({old})))
            finally:
                kernel.close()
        family = "-6" if ":" in subnet else "-4"
        routes = run(["ip", family, "route", "show", "root", subnet], namespace=NAME).splitlines()
        assert [(line.split()[0], "dev tunnel" in line) for line in routes] == [(subnet, True)]
    finally:
        delete_namespace(NAME)


def test_a_namespace_without_routes_has_no_default_route():
    """Before the first link is up, its main table does not exist, and the kernel refuses to list it."""
    run(["ip", "netns", "add", NAME])
    try:
        with in_namespace(NAME):
            kernel = OverlayKernel()
            try:
                assert kernel.default_link(FAMILIES) == 0
                assert kernel.read((), FAMILIES) == (OverlayState(), ())
            finally:
                kernel.close()
    finally:
        delete_namespace(NAME)
