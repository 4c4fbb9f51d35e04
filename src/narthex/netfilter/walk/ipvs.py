"""What IPVS does to a packet on its way: find the virtual server, draw a real one, rewrite the destination.

The places are those of net/netfilter/ipvs/ip_vs_core.c: behind nat in output, and in input behind the filter tables and
before nat. So filter rules of input see the address that the client asked for, those of output the real server's.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from narthex.model.net import join_port
from narthex.model.packet import Disposition
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.netfilter.walk.lookup import PriorityRange
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import Branch, BranchEnd, KernelObjects

_IN_INPUT, _IN_OUTPUT = 99, -98
"""NF_IP_PRI_NAT_SRC - 1 and NF_IP_PRI_NAT_DST + 2."""
BEFORE_INPUT: PriorityRange = (float("-inf"), _IN_INPUT)
AFTER_INPUT: PriorityRange = (_IN_INPUT + 1, float("inf"))
BEFORE_OUTPUT: PriorityRange = (float("-inf"), _IN_OUTPUT)
AFTER_OUTPUT: PriorityRange = (_IN_OUTPUT + 1, float("inf"))

Ended = list[tuple[Branch, BranchEnd]]


class Balancer:
    """IPVS for one packet."""

    def __init__(self, objects: KernelObjects, matcher: Matcher, name_of: Callable[[str], str]) -> None:
        self._objects = objects
        self._matcher = matcher
        self._name_of = name_of

    def balance(self, hook: str, branches: list[Branch]) -> tuple[list[Branch], list[Branch], Ended]:
        """The branches that go on here, whether or not IPVS has rewritten them, those that go to another machine, and
        those that end."""
        ended: Ended = []
        if not self._objects.servers and not self._objects.marks:
            return branches, [], ended
        stay: list[Branch] = []
        away: list[Branch] = []
        for branch in branches:
            server = self._server(branch)
            if server is not None:
                for out in self._drawn(f"{hook} IPVS", server, branch, ended):
                    (stay if self._matcher.local(out.daddr) else away).append(out)
            elif branch.mark and branch.mark in self._objects.marks:
                note = f"a virtual server for the packet mark {branch.mark:#x} takes it, which is not followed"
                ended.append((branch, BranchEnd(Disposition.UNSUPPORTED, note)))
            else:
                stay.append(branch)
        return stay, away, ended

    def _server(self, branch: Branch) -> VirtualServer | None:
        """The virtual server for exactly this port, else one for all ports."""
        protocol = self._matcher.packet.protocol
        servers = self._objects.servers
        return servers.get((branch.daddr, protocol, branch.dport)) or servers.get((branch.daddr, protocol, 0))

    def _drawn(self, where: str, server: VirtualServer, branch: Branch, ended: Ended) -> list[Branch]:
        """The branch, sent to each real server that may be drawn. Without one the kernel refuses (ip_vs_leave)."""
        shares = server.shares()
        title = f"virtual server {server.protocol.value} {join_port(server.address, server.port)} {server.scheduler}"
        if not shares:
            branch.note(where, f"{title}: no real server, reject")
            ended.append((branch, BranchEnd(Disposition.REJECTED)))
            return []
        seconds = server.persistence_seconds
        known = [(real, Fraction(1)) for real, _ in shares if seconds and self._remembered(server, real, branch)]
        drawn: list[Branch] = []
        left = Fraction(1)
        for real, share in known[:1] or shares:
            # `take` splits what is left of the branch, so a share of the whole has to be scaled up.
            out = branch.take(share / left)
            left -= share
            how = "the same real server again" if known else f"one of {len(shares)} real servers"
            out.note(
                where, f"{title}: {how}, {join_port(real.address, real.port or out.dport)}", self._name_of(real.address)
            )
            if real.forward != "masquerade":
                ended.append((out, BranchEnd(Disposition.UNSUPPORTED, f"{title}: {real.forward} to {real.address}")))
                continue
            if seconds:
                out.remembers = (*out.remembers, (record(server.key, real), (self._matcher.packet.source,)))
            out.served = server.key
            out.daddr, out.dport = real.address, real.port or out.dport
            drawn.append(out)
        return drawn

    def _remembered(self, server: VirtualServer, real: RealServer, branch: Branch) -> bool:
        key = (self._matcher.packet.source,)
        return self._matcher.remembered(record(server.key, real), key, branch, server.persistence_seconds or 0)


def record(key: ServerKey, real: RealServer) -> str:
    """Name of the list that remembers the clients of one real server of one virtual server."""
    address, protocol, port = key
    return f"ipvs {protocol.value} {join_port(address, port)} {join_port(real.address, real.port)}"
