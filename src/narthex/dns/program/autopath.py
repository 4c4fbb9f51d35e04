"""Plugin `autopath`: answers a name that does not exist by the next one of the client's search list that does."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from narthex.dns import resolv_conf
from narthex.dns.corefile.settings import Autopath
from narthex.dns.interfaces import Client, Query, Reply, Resolver
from narthex.dns.message import names, wire
from narthex.dns.message.answer import Cluster, Outside
from narthex.dns.message.response import Malformed, read
from narthex.dns.plugins.autopath import search_list, steps
from narthex.dns.server.files import text
from narthex.dns.zone.compiled import AT_QUESTION, Compiled, record, response
from narthex.dns.zone.external_name import asked_for, joined

_LARGEST = 65_535
_OWN = "/etc/resolv.conf"


def listed(settings: Autopath, say: Callable[[str], None]) -> tuple[str, ...]:
    """The search list of the plugin's file, or of this machine. One that cannot be read is said, and empty."""
    path = settings.path or _OWN
    try:
        return resolv_conf.parse(text(path)).search
    except OSError as error:
        say(f"autopath: {path} cannot be read: {error.strerror or error}")
        return ()


class AutopathResolver:
    """Asked for names that the cluster's zones do not have. A `Resolver`."""

    def __init__(
        self,
        settings: Autopath,
        cluster: Cluster,
        inner: Resolver | None,
        search: Sequence[str] = (),
        walked: Callable[[], None] = lambda: None,
    ) -> None:
        """`inner` answers names outside of the cluster. `search` is the list of the file that the settings name, or else
        of this machine, which pods have behind their own. `walked` is told of each list that led to an answer."""
        self.walked = walked
        self._settings = settings
        self._cluster = cluster
        self._inner = inner
        self._listed = tuple(names.wire(zone).lower() for zone in search)
        self._zones = tuple(names.wire(zone).lower() for zone in settings.zones)

    def takes(self, query: Query) -> bool:
        """Whether a question may stand for others: for addresses, in the plugin's zones."""
        return query.qtype in (wire.A, wire.AAAA) and any(names.within(query.name, zone) for zone in self._zones)

    def ask(self, query: Query, client: Client, reply: Reply, now: float) -> None:
        """Answer with the first name of the list that exists, behind a CNAME; or as without this plugin."""
        _Walk(self, query, client, reply, now).go_on()

    def names_after(self, query: Query, client: Client) -> tuple[bytes, ...]:
        """The names to try for this client."""
        if self._settings.path:
            return steps(query.name, self._listed)
        zone = self._cluster.zone_of(query.name)
        namespaces = self._cluster.zone.namespaces_of(ipaddress.ip_address(client.address).packed)
        # Pods of several namespaces share a node's address, and none of them can be told from the others.
        if zone is None or len(namespaces) != 1:
            return ()
        return steps(query.name, search_list(namespaces[0], zone, self._listed))

    def answer(self, query: Query, client: Client, reply: Reply, now: float) -> None:
        """The answer to one name, without a search list."""
        ours = self._cluster.zone_of(query.name)
        outside = Outside(query.qname)
        if ours is not None:
            found = self._cluster.answer(query, ours, _LARGEST)
            if isinstance(found, Compiled):
                reply(query.packet[:2] + found.tail)
                return
            outside = found
        if self._inner is None:
            reply(query.packet[:2] + response(query, wire.REFUSED, _LARGEST).tail)
            return

        def take(message: bytes | None) -> None:
            joins = message is not None and outside.links
            reply(joined(query, outside, message, _LARGEST) if joins and message is not None else message)

        self._inner.ask(asked_for(query, outside) if outside.links else query, client, take, now)


class _Walk:
    """One question on its way through the list."""

    def __init__(self, resolver: AutopathResolver, query: Query, client: Client, reply: Reply, now: float) -> None:
        self._resolver = resolver
        self._query = query
        self._client = client
        self._reply = reply
        self._now = now
        self._left = list(resolver.names_after(query, client))

    def go_on(self) -> None:
        """Try the next name."""
        if not self._left:
            self._resolver.answer(self._query, self._client, self._reply, self._now)
            return
        name = self._left.pop(0)
        query = asked_for(self._query, Outside(name))
        self._resolver.answer(query, self._client, lambda message: self._take(name, message), self._now)

    def _take(self, name: bytes, message: bytes | None) -> None:
        try:
            answer = None if message is None else read(message)
        except Malformed:
            answer = None
        if answer is None or answer.rcode not in (wire.NOERROR, wire.NXDOMAIN) or answer.truncated:
            # What fails says nothing of the names behind it, so the client walks itself.
            self._left.clear()
            self.go_on()
        elif answer.rcode == wire.NXDOMAIN:
            self.go_on()
        else:
            assert message is not None
            self._resolver.walked()
            links = [record(AT_QUESTION, wire.CNAME, answer.ttl, name)]
            self._reply(joined(self._query, Outside(name, links), message, _LARGEST))
