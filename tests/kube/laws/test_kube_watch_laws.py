"""Whatever happens to the connection, the clients come to hold what a fresh list holds."""

import random

import pytest
from tests.kube.laws.kube_simulation import Client, Server, World

from narthex.kube.resources import of_a_proxy
from narthex.lab.api.reads import ServerFeatures
from narthex.lab.encode import encode
from narthex.model.net import IPFamily
from narthex.proxy.plan.planner import plan_once
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, node, service

NAMES = [f"ns-{number % 2}/svc-{number}" for number in range(6)]
SEQUENCES = 1000
GROUPS = 20
LONG_ENOUGH = 1500.0
"""Every list has been read anew by then."""

PAUSES, WEIGHTS = (0.0, 0.1, 2.0, 40.0, 400.0, 7200.0), (4, 4, 4, 4, 2, 1)
"""Seconds between events: at once, or an hour."""

ABILITIES = (
    ServerFeatures(),
    ServerFeatures(cached_lists=False),
    ServerFeatures(streaming=False, service_cidrs=("v1beta1",), service_fields=False),
    ServerFeatures(streaming=False, service_cidrs=(), service_fields=False, bookmarks=False),
)


def change(data, dice):
    """Let something happen in the cluster."""
    name = dice.choice(NAMES)
    index = NAMES.index(name)
    what = dice.randrange(10)
    namespace, _, plain = name.partition("/")
    if what < 3:
        raw = encode(service(name, f"10.110.0.{index + 1}", port=dice.choice((80, 443))))
        if dice.random() < 0.15:
            raw["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "other"}
        if dice.random() < 0.1:
            raw["spec"]["clusterIP"] = raw["spec"]["clusterIPs"] = "None"
        if dice.random() < 0.1:
            raw["spec"]["ports"] = dice.choice(([{"port": 70000}], "many", None))
        data.put("Service", raw)
    elif what < 7:
        suffix = str(dice.randrange(2))
        pods = [endpoint(f"10.64.1.{dice.randrange(1, 200)}") for _ in range(dice.randrange(4))]
        owner = (("kubernetes.io/service-name", plain),)
        raw = encode(endpoint_slice(name, *pods, suffix=suffix, labels=owner))
        if dice.random() < 0.1:
            raw["endpoints"] = [{"addresses": ["nowhere"]}]
        if dice.random() < 0.1:
            raw["metadata"]["labels"]["service.kubernetes.io/headless"] = ""
        data.put("EndpointSlice", raw)
    elif what == 7:
        data.delete("Service", namespace, plain)
    elif what == 8:
        data.delete("EndpointSlice", namespace, f"{plain}-{dice.randrange(2)}")
    elif dice.random() < 0.7:
        data.put("Node", encode(node(dice.choice((NODE, "another")), zone=dice.choice("ab"))))
    else:
        data.delete("Node", "", NODE)


def fate(dice):
    """What becomes of one answer."""
    what = dice.choice(("cut", "cut", "garbage", "silence", "refuse", "status"))
    if what == "cut":
        return what, int(dice.expovariate(1 / 300))
    return what, dice.choice((410, 429, 500, 503, 504, 401, 403, 404))


def play(seed):
    """One random sequence; returns the world when all is calm again."""
    dice = random.Random(seed)
    server = Server(dice.choice(ABILITIES))
    trouble = [0.3]

    def fates():
        return fate(dice) if dice.random() < trouble[0] else ("", 0)

    for _ in range(dice.randrange(12)):
        change(server.data, dice)
    clients = [
        Client(server, resource, dice.random, fates, streaming=dice.random() < 0.5) for resource in of_a_proxy(NODE)
    ]
    world = World(server, clients)
    backups = [server.data.backup()]
    for _ in range(dice.randrange(5, 25)):
        what = dice.random()
        if what < 0.6:
            for _ in range(dice.randrange(1, 5)):
                change(server.data, dice)
        elif what < 0.75:
            client = dice.choice(clients)
            if client.link is not None:
                client.link.spoil(fate(dice))
        elif what < 0.82:
            server.data.compact()
        elif what < 0.88:
            backups.append(server.data.backup())
        elif what < 0.93:
            # The server comes back with older data; nobody is connected while it is away.
            server.data = dice.choice(backups).backup()
            for client in clients:
                if client.link is not None:
                    client.link.spoil(("cut", 0))
        world.run(dice.choices(PAUSES, WEIGHTS)[0] * dice.random())
    trouble[0] = 0.0
    world.run(LONG_ENOUGH)
    return world


def held(store):
    """All of a snapshot in a form that can be compared; where something was read and how often is no part of it."""
    shot = store.snapshot
    return {
        field: sorted(map(repr, getattr(shot, field).items()))
        for field in ("services", "slices", "nodes", "service_cidrs")
    }, shot.synced


@pytest.mark.row("1.15", "1.3", "2.2", "2.14")
@pytest.mark.parametrize("group", range(GROUPS))
def test_after_any_faults_the_clients_hold_what_a_fresh_list_holds(group):
    for seed in range(group * SEQUENCES // GROUPS, (group + 1) * SEQUENCES // GROUPS):
        world = play(seed)
        fresh = World(world.server, [Client(world.server, each, random.random) for each in of_a_proxy(NODE)])
        assert fresh.store.snapshot.synced, f"seed {seed}"
        assert held(world.store) == held(fresh.store), f"seed {seed}"
        plans = [plan_once(each.store.snapshot, CONFIG, IPFamily.IPV4) for each in (world, fresh)]
        assert plans[0].services == plans[1].services, f"seed {seed}"
        assert [client.watch.cache.problems for client in world.clients] == [
            client.watch.cache.problems for client in fresh.clients
        ], f"seed {seed}"
        assert not any(client.watch.trouble for client in world.clients), f"seed {seed}"
