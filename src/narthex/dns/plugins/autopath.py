"""Plugin `autopath`: walks the search list of a pod in the server instead of in the pod (row S18).

A pod's stub resolver first asks for `redis.default.NAMESPACE.svc.ZONE`, gets NXDOMAIN, and continues with the next zone of its
search list. A server that knows the list can walk it at once. The list is certain only if the question ends in its first zone,
which contains the namespace of the pod that asks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from narthex.dns.corefile.settings import AutopathSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.response import (
    AT_QUESTION,
    EncodedResponse,
    MalformedResponseError,
    build_response,
    parse_response,
    record,
)
from narthex.dns.plugins import Reply, Resolver
from narthex.dns.plugins.kubernetes import ExternalTarget, KubernetesPlugin, external_query, join_external

_SVC = b"\x03svc"
_MAX_MESSAGE = 65_535


def pod_search_path(namespace: bytes, zone: bytes, others: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the search list that the kubelet gives a pod (row S22), in wire form.

    `namespace` is a label, `zone` that of the cluster, and `others` the node's own search list, all in lower case.
    """
    return tuple(dict.fromkeys((namespace + _SVC + zone, _SVC + zone, zone, *others)))


def search_candidates(name: bytes, search: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the names to try after `name` (in lower case), the name without a zone last.

    The result is empty unless `name` is below the first zone of the list.
    """
    if not search or name == search[0] or not names.within(name, search[0]):
        return ()
    bare = name[: -len(search[0])]
    tried = (bare + zone for zone in (*search[1:], names.ROOT))
    return tuple(dict.fromkeys(each for each in tried if len(each) <= names.MAX_NAME))


class AutopathPlugin:
    """The `Resolver` of names that the zones of the cluster lack."""

    def __init__(
        self,
        settings: AutopathSettings,
        kubernetes: KubernetesPlugin,
        inner: Resolver | None,
        search: Sequence[str] = (),
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the plugin.

        Args:
            settings: Settings of the Corefile.
            kubernetes: Answers names of the cluster.
            inner: Resolves names outside the cluster.
            search: Search list of the configured file, or else of this machine, which pods append to their own.
            count: Called for each list that led to an answer.
        """
        self.count = count
        self._settings = settings
        self._kubernetes = kubernetes
        self._inner = inner
        self._search = names.lower_zones(search)
        self._zones = names.lower_zones(settings.zones)

    def applies(self, query: Query) -> bool:
        """Return True if a search list is to be walked: for addresses, in the zones of the plugin."""
        return query.qtype in wire.ADDRESS_SIZES and names.within_any(query.name, self._zones)

    def resolve(self, query: Query, client: DnsClient, reply: Reply, now: float) -> None:
        """Answer with the first name of the list that exists, after a CNAME record, or else as without this plugin."""
        left = list(self.candidates(query, client))

        def step() -> None:
            """Resolve the next name of the search list, or the name as the client sent it after the last one."""
            if not left:
                self.resolve_one(query, client, reply, now)
                return
            name = left.pop(0)
            asked = external_query(query, ExternalTarget(name))
            self.resolve_one(asked, client, lambda message: take(name, message), now)

        def take(name: bytes, message: bytes | None) -> None:
            """Reply with the message and a CNAME record to `name`, or continue with the next name after NXDOMAIN."""
            try:
                response = None if message is None else parse_response(message)
            except MalformedResponseError:
                response = None
            if response is None or response.rcode not in (wire.NOERROR, wire.NXDOMAIN) or response.truncated:
                # A failure says nothing about the remaining names, so the client must walk its list itself.
                left.clear()
                step()
            elif response.rcode == wire.NXDOMAIN:
                step()
            else:
                assert message is not None
                self.count()
                links = [record(AT_QUESTION, wire.CNAME, response.ttl, name)]
                reply(join_external(query, ExternalTarget(name, links), message, _MAX_MESSAGE))

        step()

    def candidates(self, query: Query, client: DnsClient) -> tuple[bytes, ...]:
        """Return the names to try for a client."""
        if self._settings.path:
            return search_candidates(query.name, self._search)
        zone = self._kubernetes.zone_of(query.name)
        namespaces = self._kubernetes.zone.namespaces_of(ipaddress.ip_address(client.address).packed)
        # Host-network pods of several namespaces share the address of their node and cannot be distinguished.
        if zone is None or len(namespaces) != 1:
            return ()
        return search_candidates(query.name, pod_search_path(namespaces[0], zone, self._search))

    def resolve_one(self, query: Query, client: DnsClient, reply: Reply, now: float) -> None:
        """Answer one name without a search list."""
        ours = self._kubernetes.zone_of(query.name)
        external = ExternalTarget(query.qname)
        if ours is not None:
            found = self._kubernetes.answer(query, ours, _MAX_MESSAGE)
            if isinstance(found, EncodedResponse):
                reply(query.packet[:2] + found.tail)
                return
            external = found
        if self._inner is None:
            reply(query.packet[:2] + build_response(query, wire.REFUSED, _MAX_MESSAGE).tail)
            return

        def join(message: bytes | None) -> None:
            """Reply with the upstream's message after the records that lead to the external name."""
            if message is not None and external.links:
                message = join_external(query, external, message, _MAX_MESSAGE)
            reply(message)

        self._inner.resolve(external_query(query, external) if external.links else query, client, join, now)
