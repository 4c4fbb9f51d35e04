"""Virtual and real servers by netlink, beside what ipvsadm sees."""

import os

import msgspec
import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run
from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.ipvs import RealServer, VirtualServer, parse_ipvsadm
from narthex.netfilter.netlink.ipvs import IpvsCommand, IpvsTimeouts, read_timeouts
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.ipvs.rules import RealChanges
from narthex.proxy.kernel import virtual_servers as ipvs_kernel
from narthex.proxy.kernel.virtual_servers import IpvsServers

SCHEDULERS = ("rr", "wrr", "lc", "wlc", "dh", "sh", "sed", "nq", "mh", "fo", "ovf")


@pytest.fixture
def space():
    name = f"nx-ipvs-{os.getpid()}"
    create_namespace(name)
    yield name
    delete_namespace(name)


def server(address="10.110.0.1", port=80, *reals, protocol=Protocol.TCP, scheduler="rr", **more):
    return VirtualServer(address=address, protocol=protocol, port=port, scheduler=scheduler, reals=reals, **more)


def shown(space):
    """What ipvsadm says, read by the parser that traces use."""
    return parse_ipvsadm(run(["ipvsadm", "-S", "-n"], namespace=space)).servers


EVERYTHING = {
    IPFamily.IPV4: [
        server("10.110.0.1", 80, RealServer("10.64.1.5", 8080), RealServer("10.64.1.6", 8080, 7)),
        server("10.110.0.2", 53, RealServer("10.64.1.5", 53), protocol=Protocol.UDP, persistence_seconds=10800),
        server("10.110.0.3", 99, RealServer("10.64.1.5", 99), protocol=Protocol.SCTP, scheduler="wlc"),
        server("10.110.0.4", 443, scheduler="mh", hash_ports=True, persistence_seconds=60),
    ],
    IPFamily.IPV6: [
        server("fd6e::1", 80, RealServer("fd64::5", 8080), RealServer("fd64::6", 8080, 65535)),
        server("fd6e::2", 53, RealServer("fd64::5", 53), protocol=Protocol.UDP, persistence_seconds=86400),
    ],
}
FAMILIES = tuple(EVERYTHING)


def by_key(servers):
    return {each.key: each for each in servers}


@pytest.mark.row("24.6")
def test_what_is_written_is_read_and_is_what_ipvsadm_shows(space):
    for family, servers in EVERYTHING.items():
        IpvsServers(family, space).change(servers)
    for family, servers in EVERYTHING.items():
        assert IpvsServers(family, space).read(lambda _: True) == by_key(servers)
    assert shown(space) == by_key(each for servers in EVERYTHING.values() for each in servers)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_edits_and_removals(space, family):
    first, second, *others = EVERYTHING[family]
    servers = IpvsServers(family, space)
    servers.change([first, second, *others])
    plain, heavy = first.reals
    new = RealServer(plain.address, plain.port + 1, 3)
    servers.change(
        edited=[msgspec.structs.replace(first, scheduler="mh", hash_ports=True, persistence_seconds=5)],
        removed=[second.key],
        reals={
            first.key: RealChanges(added=(new,), edited=(msgspec.structs.replace(plain, weight=9),), removed=(heavy,))
        },
    )
    edited = msgspec.structs.replace(
        first,
        scheduler="mh",
        hash_ports=True,
        persistence_seconds=5,
        reals=(msgspec.structs.replace(plain, weight=9), new),
    )
    assert servers.read(lambda _: True) == shown(space) == by_key([edited, *others])
    servers.change(edited=[msgspec.structs.replace(first, reals=())], removed=[each.key for each in others])
    assert shown(space) == by_key([msgspec.structs.replace(first, reals=edited.reals)])


def test_what_is_there_already_is_edited_and_what_is_gone_is_no_error(space):
    """Somebody else has changed things since we looked."""
    first = EVERYTHING[IPFamily.IPV4][0]
    run(["ipvsadm", "-A", "-t", "10.110.0.1:80", "-s", "wlc", "-p", "7"], namespace=space)
    for real, way in (("10.64.1.5:8080", "-g"), ("10.64.1.9:8080", "-m")):
        run(["ipvsadm", "-a", "-t", "10.110.0.1:80", "-r", real, way, "-w", "0"], namespace=space)
    servers = IpvsServers(IPFamily.IPV4, space)
    servers.change([first])
    assert shown(space) == by_key([first])
    run(["ipvsadm", "-C"], namespace=space)
    servers.change(removed=[first.key])
    servers.change([first])
    run(["ipvsadm", "-d", "-t", "10.110.0.1:80", "-r", "10.64.1.6:8080"], namespace=space)
    with pytest.raises(
        ApplyError, match=r"real server 10\.64\.1\.6:8080 of virtual server 10\.110\.0\.1:80/TCP: No such"
    ):
        servers.change(reals={first.key: RealChanges(removed=(first.reals[1],))})


def test_others_are_passed_over(space):
    """Those found by a packet mark, and whatever the caller does not call ours."""
    run(["ipvsadm", "-A", "-f", "1", "-s", "rr"], namespace=space)
    run(["ipvsadm", "-A", "-t", "192.0.2.1:80", "-s", "rr"], namespace=space)
    servers = IpvsServers(IPFamily.IPV4, space)
    assert servers.read(lambda key: key[0] != "192.0.2.1") == {}
    assert list(servers.read(lambda _: True)) == [("192.0.2.1", Protocol.TCP, 80)]


@pytest.mark.parametrize(
    ("words", "oddity"),
    [
        (["-o"], "flags 0x4"),
        (["-b", "flag-1"], "flags 0x8"),
        (["-p", "60", "-M", "255.255.255.0"], "persistence for networks"),
    ],
)
def test_settings_that_are_never_ours_differ_from_every_wish(space, words, oddity):
    run(["ipvsadm", "-A", "-u", "192.0.2.1:80", "-s", "rr", *words], namespace=space)
    servers = IpvsServers(IPFamily.IPV4, space)
    ((key, found),) = servers.read(lambda _: True).items()
    assert found.scheduler == f"rr ({oddity})"
    plain = server("192.0.2.1", 80, protocol=Protocol.UDP)
    servers.change(edited=[plain])
    assert servers.read(lambda _: True) == {key: plain}


@pytest.mark.row("24.1", "24.6")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler_loads_and_is_accepted(space, name):
    ipvs_kernel.check_scheduler(name, space)
    assert shown(space) == {}, "the throw-away server stays"
    wanted = server("10.110.0.1", 80, RealServer("10.64.1.5", 8080), scheduler=name)
    IpvsServers(IPFamily.IPV4, space).change([wanted])
    assert shown(space) == by_key([wanted])
    ipvs_kernel.check_scheduler(name, space)


@pytest.mark.row("24.1")
def test_a_scheduler_that_is_not_there(space):
    with pytest.raises(ApplyError, match=r"this kernel has no IPVS scheduler 'best' \(module ip_vs_best\)"):
        ipvs_kernel.check_scheduler("best", space)
    with pytest.raises(ApplyError) as told:
        IpvsServers(IPFamily.IPV4, space).change([server("10.110.0.1", 80, scheduler="best")])
    assert str(told.value) == (
        "virtual server 10.110.0.1:80/TCP: the kernel has no scheduler 'best' and cannot load one (module ip_vs_best)"
    )


@pytest.mark.row("24.1")
def test_a_server_that_has_the_scheduler_saves_the_trial(space):
    """Nothing is written then, not even where the trial would be."""
    run(["ipvsadm", "-A", "-t", "198.51.100.0:20000", "-s", "lc"], namespace=space)
    ipvs_kernel.check_scheduler("lc", space)
    assert list(shown(space)) == [("198.51.100.0", Protocol.TCP, 20000)]


def timeouts(space):
    link = ipvs_kernel.connect(space)
    try:
        return read_timeouts(link.ask(IpvsCommand.GET_TIMEOUTS))
    finally:
        link.close()


@pytest.mark.row("24.7")
def test_timeouts_are_set_only_if_asked_for(space):
    before = timeouts(space)
    assert ipvs_kernel.set_timeouts(IpvsTimeouts(0, 0, 0), space) is None
    assert timeouts(space) == before
    assert ipvs_kernel.set_timeouts(IpvsTimeouts(0, 77, 0), space) == before
    assert timeouts(space) == IpvsTimeouts(before.tcp, 77, before.udp)
    assert ipvs_kernel.set_timeouts(IpvsTimeouts(0, 77, 0), space) is None
    assert run(["ipvsadm", "-L", "--timeout"], namespace=space).split()[-3:] == [str(before.tcp), "77", str(before.udp)]
