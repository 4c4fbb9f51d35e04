"""Route look-ups in a namespace of their own."""

import os

import pytest

from narthex.lab.program.trace import RouteHop, next_hop
from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel


@pytest.fixture
def namespace():
    name = f"nxr-{os.getpid()}"
    create_namespace(name)
    try:
        run(["ip", "link", "add", "va", "type", "veth", "peer", "name", "vb"], namespace=name)
        for words in ("address add 10.9.1.1/24 dev va", "link set va up", "link set vb up",
                      "route add 10.9.2.0/24 via 10.9.1.2", "route add unreachable 10.9.3.0/24"):  # fmt: skip
            run(["ip", *words.split()], namespace=name)
        yield name
    finally:
        delete_namespace(name)


def test_routes_of_a_namespace(namespace: str) -> None:
    assert next_hop("10.9.1.7", namespace) == RouteHop(device="va")
    assert next_hop("10.9.2.7", namespace) == RouteHop(device="va", via="10.9.1.2")
    assert next_hop("10.9.1.1", namespace) == RouteHop(device="lo", local=True)
    assert "unreachable" in next_hop("192.0.2.1", namespace).problem.lower()
    assert next_hop("10.9.3.1", namespace).problem
    assert next_hop("fd00::1", namespace).problem
