"""The order of messages to IPVS, which the kernel takes one by one: a packet or a kill may come between any two."""

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.ipvs import RealServer
from narthex.netfilter.netlink.ipvs import IpvsCommand
from narthex.proxy.backends.ipvs.rules import RealChanges
from narthex.proxy.kernel.virtual_servers import IpvsServers

OLD, NEW = RealServer("10.64.1.5", 80), RealServer("10.64.1.6", 80)


class Link:
    """A socket that notes commands, and lists nothing."""

    def __init__(self):
        self.commands = []

    def write(self, requests):
        self.commands += [command for command, _ in requests]
        return [None] * len(requests)

    def listing(self, command, attributes=()):
        assert command or attributes
        return []


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_the_new_real_servers_are_there_before_the_old_ones_leave(protocol):
    servers, link = IpvsServers(IPFamily.IPV4), Link()
    servers._socket = link
    servers.change(reals={("10.110.0.1", protocol, 80): RealChanges(added=(NEW,), removed=(OLD,))})
    leaving = IpvsCommand.SET_REAL if protocol is Protocol.TCP else IpvsCommand.DELETE_REAL
    assert link.commands[:2] == [IpvsCommand.NEW_REAL, leaving]
