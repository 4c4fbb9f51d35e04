"""Narthex's own table of nftables as `nft -j` prints it."""

import os
from collections.abc import Iterator

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run
from narthex.model import Snapshot
from narthex.model.objects import EndpointPort, ServicePort
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

pytestmark = pytest.mark.kernel

OWN = "192.168.1.11"


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"nxj-{os.getpid()}"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


def test_the_json_of_the_own_table_gives_the_answers_of_its_text(namespace: str) -> None:
    wanted = plan(
        service("shop/web", "10.96.0.9", ports=(ServicePort(name="http", port=80, node_port=30080),), type="NodePort"),
        endpoint_slice(
            "shop/web", endpoint("10.244.1.7"), endpoint("10.244.2.7"), ports=(EndpointPort(name="http", port=8080),)
        ),
        service("shop/idle", "10.96.0.10", ports=(ServicePort(name="http", port=80),)),
        cluster_cidrs=("10.244.0.0/16",),
        node_addresses=(OWN,),
        node_port_addresses=None,
    )
    backend = BACKENDS["nftables"]
    run(["nft", "-f", "-"], stdin=backend.text(backend.render(wanted)), namespace=namespace)
    texts = [run(["nft", *form, "list", "ruleset"], namespace=namespace) for form in ([], ["-j"])]
    for source in ("198.51.100.7", "10.244.1.7", OWN):
        for to in ("10.96.0.9:80", "10.96.0.10:80", "10.96.0.9:81", f"{OWN}:30080"):
            answers = [
                travel(
                    KnownCluster(views=(view_of_files([("rules", text)]),), snapshot=Snapshot(), node_ips=(OWN,)),
                    TraceRequest(source=source, destination=to),
                ).ends()
                for text in texts
            ]
            assert answers[0] == answers[1], (source, to)
            assert not any(key[0].value == "unknown" for key in answers[0])
