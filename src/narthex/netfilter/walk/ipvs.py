"""The IPVS stage of a walk: find the virtual server, select a real server, rewrite the destination.

The hooks are those of net/netfilter/ipvs/ip_vs_core.c: after nat in output, and in input after the filter tables and before
nat. Filter rules of input therefore see the virtual address, those of output the address of the real server.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from narthex.model import Disposition, join_port
from narthex.netfilter.describe import one_of
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.netfilter.walk.matches import Matcher
from narthex.netfilter.walk.state import Branch, BranchEnd, KernelObjects

Ended = list[tuple[Branch, BranchEnd]]


class IpvsStage:
    """IPVS for one packet."""

    def __init__(self, objects: KernelObjects, matcher: Matcher, name_of: Callable[[str], str]) -> None:
        self._objects = objects
        self._matcher = matcher
        self._name_of = name_of

    def balance(self, hook: str, branches: list[Branch]) -> tuple[list[Branch], list[Branch], Ended]:
        """Return the branches that stay on this host, rewritten or not, those to other hosts, and those that end."""
        ended: Ended = []
        if not self._objects.servers and not self._objects.marks:
            return branches, [], ended
        stay: list[Branch] = []
        away: list[Branch] = []
        for branch in branches:
            server = self._server(branch)
            if server is not None:
                for out in self._selected(f"{hook} IPVS", server, branch, ended):
                    (stay if self._matcher.local(out.daddr) else away).append(out)
            elif branch.mark and branch.mark in self._objects.marks:
                note = f"a virtual server for the packet mark {branch.mark:#x} handles it, which is not supported"
                ended.append((branch, BranchEnd(Disposition.UNSUPPORTED, note)))
            else:
                stay.append(branch)
        return stay, away, ended

    def _server(self, branch: Branch) -> VirtualServer | None:
        """Return the virtual server for this port, or else the one for all ports."""
        protocol = self._matcher.packet.protocol
        servers = self._objects.servers
        return servers.get((branch.daddr, protocol, branch.dport)) or servers.get((branch.daddr, protocol, 0))

    def _selected(self, where: str, server: VirtualServer, branch: Branch, ended: Ended) -> list[Branch]:
        """Return one branch per real server that may be selected. Without any, the kernel rejects (ip_vs_leave)."""
        shares = server.shares()
        title = f"virtual server {server.protocol.value} {join_port(server.address, server.port)} {server.scheduler}"
        if not shares:
            branch.note(where, f"{title}: no real server, reject")
            ended.append((branch, BranchEnd(Disposition.REJECTED)))
            return []
        seconds = server.persistence_seconds
        known = [(real, Fraction(1)) for real, _ in shares if seconds and self._remembered(server, real, branch)]
        selected: list[Branch] = []
        left = Fraction(1)
        for real, share in known[:1] or shares:
            # `take` splits the remainder of the branch, so a share of the whole has to be scaled.
            out = branch.take(share / left)
            left -= share
            how = "the same real server again" if known else one_of(len(shares), "real server")
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
            selected.append(out)
        return selected

    def _remembered(self, server: VirtualServer, real: RealServer, branch: Branch) -> bool:
        key = (self._matcher.packet.source,)
        return self._matcher.remembered(record(server.key, real), key, branch, server.persistence_seconds or 0)


def record(key: ServerKey, real: RealServer) -> str:
    """Return the name of the list of the persistent clients of a real server."""
    address, protocol, port = key
    return f"ipvs {protocol.value} {join_port(address, port)} {join_port(real.address, real.port)}"
