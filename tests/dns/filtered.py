"""A server of one Corefile in this process: a cluster, and an outside world of a few records in place of upstreams."""

from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from narthex.dns.corefile.parse import parse
from narthex.dns.message import names
from narthex.dns.message.query import DnsClient
from narthex.dns.plugins.kubernetes import KubernetesPlugin
from narthex.dns.plugins.transfer import TransferPlugin
from narthex.dns.server.counters import AnswerCounter
from narthex.dns.server.dispatcher import (
    BlockPlugins,
    Dispatcher,
    LocalAnswer,
    PendingQuery,
    PendingTransfer,
    Recursion,
    let_look_up,
    with_filters,
)
from narthex.dns.zone.changes import ZoneTracker
from narthex.dns.zone.zone import Zone
from narthex.model.store import Store, Synced, Upsert

WORLD = (
    "www.example.org. 300 IN A 192.0.2.1",
    "www.example.org. 300 IN AAAA 2001:db8::1",
    "v4.example.org. 300 IN A 192.0.2.4",
    "alias.example.org. 300 IN CNAME v4.example.org.",
    "alias.example.org. 300 IN A 192.0.2.4",
    "mail.example.org. 300 IN MX 10 www.example.org.",
    "_x._tcp.example.org. 300 IN SRV 1 2 3 www.example.org.",
    "example.org. 300 IN NS ns.example.org.",
)
SOA = "example.org. 60 IN SOA ns.example.org. host.example.org. 1 2 3 4 60"


class Outside:
    """Answers as an upstream does: records by name and type, with authority and additional records."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def resolve(self, query: Any, client: Any, reply: Any, now: float) -> None:
        assert client.address and now == 7.0
        asked = dns.message.from_wire(query.packet)
        name, type_ = names.text(query.name), dns.rdatatype.to_text(query.qtype)
        self.asked.append(f"{name} {type_}")
        answer = dns.message.make_response(asked, recursion_available=True)
        found = [text.split(None, 4) for text in WORLD if text.startswith(name)]
        here = [each for each in found if (each[3] in (type_, "CNAME") and each[3] == type_) or (each[3] == "CNAME")]
        for owner, ttl, class_, kind, data in (each for each in found if each[3] == type_ or each in here):
            owner = "v4.example.org." if owner.startswith("alias") and kind != "CNAME" else owner
            answer.answer.append(dns.rrset.from_text(owner, int(ttl), class_, kind, data))
        if not answer.answer:
            answer.set_rcode(dns.rcode.NOERROR if found else dns.rcode.NXDOMAIN)
        owner, ttl, class_, kind, data = SOA.split(None, 4)
        answer.authority.append(dns.rrset.from_text(owner, int(ttl), class_, kind, data))
        answer.additional.append(dns.rrset.from_text("ns.example.org.", 300, "IN", "A", "192.0.2.53"))
        reply(answer.to_wire())


class Filtered:
    """The server, and a way to ask it that reads like dig."""

    def __init__(self, corefile: str, *objects: Any, own: tuple[str, ...] = ("10.20.0.11",)) -> None:
        self.corefile = parse(corefile)
        self.outside = Outside()
        self.log: list[str] = []
        self.counter = AnswerCounter(lambda: None)
        self.recursion = Recursion(("0.0.0.0/0", "::/0"), self.counter, lambda: 7.0)
        store = Store()
        store.apply_all([*map(Upsert, objects), Synced()])
        changed, pods = store.take_changed(), store.take_changed_pods()
        blocks = []
        for block in self.corefile.blocks:
            kubernetes = None
            if block.kubernetes is not None:
                zone = Zone(block.kubernetes.pods, zonal=block.kubernetes.zonal)
                zone.apply(ZoneTracker(block.kubernetes).update(store.snapshot, changed, pods, 1))
                kubernetes = KubernetesPlugin(block.kubernetes, zone, own, rotate=block.loadbalance is not None)
            resolver = self.outside if block.forwards else None
            transfer = TransferPlugin(block.transfer, kubernetes) if block.transfer and kubernetes else None
            plugins = BlockPlugins(block.zones, kubernetes, resolver, transfer=transfer, bufsize=block.bufsize)
            blocks.append(with_filters(plugins, block, self.recursion, self.log.append))
        self.dispatcher = Dispatcher(blocks)
        let_look_up(blocks, self.dispatcher, self.recursion)

    def ask(
        self, name: str, type_: str = "A", client: str = "10.64.1.9", transport: Any = "udp", **options: Any
    ) -> Any:
        """dnspython's view of the response; None if there is none."""
        query = dns.message.make_query(name, type_, **options)
        packet = query.to_wire()
        found: list[bytes | None] = []
        made = self.dispatcher.handle(packet, transport)
        if isinstance(made, LocalAnswer):
            found.append(packet[:2] + made.response.tail)
        else:
            assert isinstance(made, PendingQuery)
            self.recursion.resolve(made, DnsClient(client, transport, 4321), found.append)
        (data,) = found
        if data is None:
            return None
        answer = dns.message.from_wire(data)
        assert answer.id == query.id and answer.question == query.question
        return answer

    def transfer(self, zone: str, type_: str = "AXFR", client: str = "10.64.1.9", **options: Any) -> list[Any]:
        """The messages of a zone transfer."""
        made = self.dispatcher.handle(dns.message.make_query(zone, type_, **options).to_wire(), "tcp")
        assert isinstance(made, PendingTransfer)
        messages = made.plugin.transfer(made.query, DnsClient(client, "tcp"))
        return [dns.message.from_wire(message, one_rr_per_rrset=True) for message in messages]

    def kept(self, name: str, type_: str = "A") -> bool:
        """Whether the answer comes from the zones, and thus from the packet cache the next time."""
        packet = dns.message.make_query(name, type_).to_wire()
        return isinstance(self.dispatcher.handle(packet, "udp"), LocalAnswer)


def shown(section: Any) -> list[str]:
    """Records as `NAME TTL TYPE DATA`."""
    return [
        f"{rrset.name} {rrset.ttl} {dns.rdatatype.to_text(rrset.rdtype)} {rdata.to_text()}"
        for rrset in section
        for rdata in rrset
    ]
