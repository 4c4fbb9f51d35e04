"""Dispatches the queries of one port to the plugins of the matching server block.

`Dispatcher.handle` returns a response from the cluster's zones, or a `PendingQuery` that `Recursion` passes to the plugin
chain of the server block if the client may use recursion.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query, Transport, max_response_size, parse_query
from narthex.dns.message.response import EncodedResponse, Sections, build_response, header_response, truncate
from narthex.dns.message.wire import rcode_label, type_label
from narthex.dns.plugins import Reply, Resolver
from narthex.dns.plugins.autopath import AutopathPlugin
from narthex.dns.plugins.k8s_external import K8sExternalPlugin
from narthex.dns.plugins.kubernetes import ExternalTarget, KubernetesPlugin, external_query, join_external
from narthex.dns.plugins.log import QueryLog
from narthex.dns.plugins.transfer import TransferPlugin
from narthex.dns.server.counters import AnswerCounter, AnswerLabels
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.filters import QueryFilters, has_filters
from narthex.dns.server.packet_cache import NxdomainTemplates, PacketCache, PacketCounter
from narthex.runtime.connection_slots import ConnectionSlots

DROPPED = "dropped"
"""Zone label of queries that no server block takes, as in CoreDNS."""
KUBERNETES = "kubernetes"
DEFAULT_RECURSION_NETWORKS = (
    "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16",
    "::1/128", "fc00::/7", "fe80::/10",
)  # fmt: skip
"""Clients that may use recursion by default: this machine, private networks, and shared address space.

Open resolvers are used for reflection attacks (RFC 5358), so that all others get REFUSED.
"""
_MAX_KNOWN_CLIENTS = 4096
_TRANSFERS = (wire.AXFR, wire.IXFR)
MAX_MESSAGE = 65_535
"""Longest message over TCP; limit of responses that filters change before they are truncated for the client."""


class BlockPlugins(msgspec.Struct, frozen=True):
    """The plugins of one server block that answer queries."""

    zones: tuple[str, ...]
    kubernetes: KubernetesPlugin | None
    resolver: Resolver | None
    autopath: AutopathPlugin | None = None
    external: K8sExternalPlugin | None = None
    filters: QueryFilters | None = None
    transfer: TransferPlugin | None = None
    bufsize: int | None = None

    @property
    def plain(self) -> bool:
        """True without plugins that concern queries before the zones are asked."""
        return self.filters is None and self.transfer is None and self.bufsize is None


class PendingQuery(msgspec.Struct, frozen=True):
    """A query that a resolver must answer or complete."""

    query: Query
    resolver: Resolver
    zone: str
    external: ExternalTarget
    without_recursion: EncodedResponse | None = None
    """Response for clients that may not use recursion; None: REFUSED."""
    filtered: bool = False
    """True if the resolver is the filters of a server block, which may answer all clients."""


class LocalAnswer(msgspec.Struct, frozen=True):
    """A response from the zones of the cluster."""

    response: EncodedResponse
    labels: AnswerLabels


class RejectedPacket(msgspec.Struct, frozen=True):
    """The whole error response to a packet that is not a valid query."""

    message: bytes
    labels: AnswerLabels


class PendingTransfer(msgspec.Struct, frozen=True):
    """A zone transfer over TCP."""

    query: Query
    plugin: TransferPlugin
    labels: AnswerLabels


class Dispatcher:
    """Dispatches the queries of one port. Contains no I/O."""

    def __init__(self, blocks: Sequence[BlockPlugins]) -> None:
        self._by_zone = {names.wire(zone).lower(): (block, zone) for block in blocks for zone in block.zones}
        self.main_zone = blocks[0].zones[0] if blocks and blocks[0].zones else DROPPED
        """Zone label for the duration of batches."""
        closed = {
            zone: block.kubernetes.zone
            for block in blocks
            if block.kubernetes is not None
            for zone in block.kubernetes.closed_zones()
            if self._block(zone)[0] is block
            and block.filters is None
            and not any(names.within(other, zone) for other in self._by_zone if other != zone)
            and not (block.external and any(names.within(other, zone) for other in block.external.zones))
        }
        self.nxdomain = NxdomainTemplates(closed)

    def handle(
        self, packet: bytes, transport: Transport
    ) -> LocalAnswer | PendingQuery | PendingTransfer | RejectedPacket | None:
        """Answer a packet, or return who must. None: it gets no response. Never raises, whatever the packet contains."""
        query = parse_query(packet)
        if query is None:
            return None
        if isinstance(query, int):
            labels = AnswerLabels(DROPPED, wire.OTHER, rcode_label(query), "")
            return RejectedPacket(header_response(packet, query), labels)
        limit = max_response_size(query, transport)
        if query.edns_version:
            # Only EDNS version 0 exists (row S4).
            return _local(build_response(query, wire.BADVERS, limit), query, DROPPED)
        block, zone = self._block(query.name)
        if block is not None and block.plain and query.qclass == wire.IN:
            return answer_in_block(query, block, zone, limit)
        if query.qtype in _TRANSFERS and transport == "tcp" and block is not None and block.transfer is not None:
            labels = AnswerLabels(zone, type_label(query.qtype), rcode_label(wire.NOERROR), "transfer")
            return PendingTransfer(query, block.transfer, labels)
        return self.answer(query, limit)

    def answer(self, query: Query, limit: int) -> LocalAnswer | PendingQuery:
        """Answer a query in `limit` bytes, or return who must."""
        block, zone = self._block(query.name)
        if block is None:
            return _local(build_response(query, wire.REFUSED, limit), query, zone)
        if block.bufsize is not None and query.edns_size is not None and query.edns_size > block.bufsize:
            query = msgspec.structs.replace(query, edns_size=block.bufsize)
            limit = limit if limit == MAX_MESSAGE else max_response_size(query, "udp")
        if block.filters is not None and block.filters.concerns(query):
            return PendingQuery(query, block.filters, zone, ExternalTarget(query.qname), filtered=True)
        if query.qclass != wire.IN:
            return _local(build_response(query, wire.REFUSED, limit), query, zone)
        return answer_in_block(query, block, zone, limit)

    def learn(self, key: bytes, answer: LocalAnswer, counter: PacketCounter) -> None:
        """Learn from an answer how to build similar ones without parsing (see `NxdomainTemplates`)."""
        if answer.labels.plugin == KUBERNETES:
            self.nxdomain.learn(key, answer.response, counter)

    def _block(self, name: bytes) -> tuple[BlockPlugins | None, str]:
        for suffix in names.suffixes(name):
            found = self._by_zone.get(suffix)
            if found is not None:
                return found
        return None, DROPPED


def answer_in_block(query: Query, block: BlockPlugins, zone: str, limit: int) -> LocalAnswer | PendingQuery:
    """Answer a query from the zones of a server block, or return the resolver that must; without its filters."""
    external = ExternalTarget(query.qname)
    if block.external is not None and (theirs := block.external.zone_of(query.name)) is not None:
        response = block.external.answer(query, theirs, limit)
        if response is not None:
            return _local(response, query, zone, "k8s_external")
    kubernetes = block.kubernetes
    if kubernetes is not None and (ours := kubernetes.zone_of(query.name)) is not None:
        found = kubernetes.answer(query, ours, limit)
        if isinstance(found, EncodedResponse):
            autopath = block.autopath
            if found.rcode == wire.NXDOMAIN and autopath is not None and autopath.applies(query):
                return PendingQuery(query, autopath, zone, external, found)
            return _local(found, query, zone, KUBERNETES)
        external = found
    if block.resolver is not None:
        return PendingQuery(query, block.resolver, zone, external)
    if external.links and kubernetes is not None:
        response = build_response(query, wire.NOERROR, limit, Sections(external.links), authoritative=True)
        return _local(response, query, zone, KUBERNETES)
    return _local(build_response(query, wire.REFUSED, limit), query, zone)


def _local(response: EncodedResponse, query: Query, zone: str, plugin: str = "") -> LocalAnswer:
    labels = AnswerLabels(zone, type_label(query.qtype), rcode_label(response.rcode), plugin)
    return LocalAnswer(response, labels)


class Recursion:
    """Passes pending queries of permitted clients to their resolvers, and finishes the responses. One per worker."""

    def __init__(self, networks: Sequence[str], counter: AnswerCounter, now: Callable[[], float]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._counter = counter
        self._now = now
        self._known: dict[str, bool] = {}

    def resolve(self, pending: PendingQuery, client: DnsClient, reply: Reply) -> None:
        """Call `reply` once with a message that the client takes, or None."""
        query = pending.query
        limit = max_response_size(query, client.transport)
        started = time.perf_counter()
        if not (pending.filtered or self.permits(client.address)):
            alone = pending.without_recursion
            message = query.packet[:2] + (alone or build_response(query, wire.REFUSED, limit)).tail
            self._count(pending, client, message, "acl" if alone is None else KUBERNETES)
            reply(message)
            return

        def finish(message: bytes | None) -> None:
            """Truncate the upstream's message to the client's limit, count it, and reply.

            None means that there is no reply.
            """
            if message is not None:
                message = truncate(message, query, limit)
                self._counter.observe(pending.zone, time.perf_counter() - started, 1)
                self._count(pending, client, message, "" if pending.filtered else "forward")
            reply(message)

        self._ask(pending, client, finish, limit)

    def finish(self, answer: LocalAnswer | PendingQuery, query: Query, client: DnsClient, reply: Reply) -> None:
        """Call `reply` with a message of any length for filters, which is neither counted nor truncated."""
        if isinstance(answer, LocalAnswer):
            response = answer.response
            reply(
                query.packet[:2]
                + (response.tail if response.rotation is None else response.rotation.turned(random.getrandbits(16)))
            )
        elif answer.filtered or self.permits(client.address):
            self._ask(answer, client, reply, MAX_MESSAGE)
        else:
            alone = answer.without_recursion or build_response(query, wire.REFUSED, MAX_MESSAGE)
            reply(query.packet[:2] + alone.tail)

    def _ask(self, pending: PendingQuery, client: DnsClient, reply: Reply, limit: int) -> None:
        query, external = pending.query, pending.external

        def join(message: bytes | None) -> None:
            """Reply with the upstream's message after the records that lead to the external name."""
            reply(message if message is None else join_external(query, external, message, limit))

        if external.links:
            pending.resolver.resolve(external_query(query, external), client, join, self._now())
        else:
            pending.resolver.resolve(query, client, reply, self._now())

    def permits(self, address: str) -> bool:
        """Return True if a client may use recursion."""
        known = self._known.get(address)
        if known is None:
            ip = ipaddress.ip_address(address)
            known = any(ip.version == network.version and ip in network for network in self._networks)
            if len(self._known) >= _MAX_KNOWN_CLIENTS:
                self._known.clear()
            self._known[address] = known
        return known

    def _count(self, pending: PendingQuery, client: DnsClient, message: bytes, plugin: str) -> None:
        rcode = wire.HEADER.unpack_from(message)[1] & 0xF
        labels = AnswerLabels(pending.zone, type_label(pending.query.qtype), rcode_label(rcode), plugin)
        family = 2 if ":" in client.address else 1
        size = len(pending.query.packet)
        self._counter.counter((client.transport, family, labels, size, len(message)))[0] += 1


def with_filters(
    plugins: BlockPlugins, block: ServerBlock, recursion: Recursion, log: Callable[[str], None]
) -> BlockPlugins:
    """Return the plugins of a server block with its filters, if it has some. `log` gets the errors of filters."""
    if not has_filters(block):
        return plugins
    filters = QueryFilters(block, log)

    def inner(query: Query, client: DnsClient, reply: Reply) -> None:
        """Answer a query from the block's plugins and upstreams, without its filters."""
        recursion.finish(answer_in_block(query, plugins, block.zones[0], MAX_MESSAGE), query, client, reply)

    filters.inner = inner
    return msgspec.structs.replace(plugins, filters=filters)


def let_look_up(blocks: Sequence[BlockPlugins], dispatcher: Dispatcher, recursion: Recursion) -> None:
    """Let the filters of server blocks ask the whole server for other names."""

    def look_up(query: Query, client: DnsClient, reply: Reply) -> None:
        """Resolve a query as if a client had sent it, through the whole dispatcher."""
        recursion.finish(dispatcher.answer(query, MAX_MESSAGE), query, client, reply)

    for block in blocks:
        if block.filters is not None:
            block.filters.lookup = look_up


class ServerContext(msgspec.Struct, frozen=True):
    """What the servers of one worker share that have the same dispatcher."""

    dispatcher: Dispatcher
    counter: AnswerCounter
    loop: EventLoop
    recursion: Recursion
    log: QueryLog | None = None
    slots: ConnectionSlots[Any] = msgspec.field(default_factory=ConnectionSlots)
    """The TCP connections of all servers of the worker."""


class QueryServer:
    """A server for one socket in the thread of the event loop."""

    transport: Transport

    def __init__(self, sock: socket.socket, context: ServerContext, max_bytes: int) -> None:
        """`max_bytes` bounds the packet cache."""
        self.sock = sock
        self.family = 1 if sock.family == socket.AF_INET else 2
        self.dispatcher = context.dispatcher
        self.counter = context.counter
        self.loop = context.loop
        self.recursion = context.recursion
        self.log = context.log
        self.cache = PacketCache(max_bytes)

    def close(self) -> None:
        """Close the socket; queries in its buffer are lost."""
        self.loop.unregister(self.sock.fileno())
        self.sock.close()

    def forget(self) -> None:
        """Clear the packet cache: a zone has changed, or the counters are no longer valid."""
        self.cache.clear()

    def count(self, labels: AnswerLabels, packet: bytes, size: int) -> PacketCounter:
        """Count the answer of `size` bytes to a packet, and return its counter."""
        counter = self.counter.counter((self.transport, self.family, labels, len(packet), size))
        counter[0] += 1
        return counter

    def log_query(self, zone: str, packet: bytes, message: bytes, client: DnsClient, port: int, started: float) -> None:
        """Log a query that was received at `started`, and its response, if the server block logs queries."""
        if self.log is not None and self.log.covers(zone):
            self.log.log_query(zone, packet, message, client, port, time.perf_counter() - started)
