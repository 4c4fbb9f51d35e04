"""All causes, in the order in which a packet meets them, and findings of them.

Tests check the pages in docs/reference/causes/ and their index against this table.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Cause(msgspec.Struct, frozen=True):
    """A reason why a path fails; `docs/reference/causes/ID.md` describes it."""

    id: str
    title: str
    """For lists: "The Service has no endpoint that is ready"."""

    @property
    def page(self) -> str:
        """The path of its page in the repository."""
        return f"docs/reference/causes/{self.id}.md"


_GROUPS: dict[str, dict[str, str]] = {
    "What is broken, or never begins": {
        "node-dead": "A node of the lab is dead",
        "fault-partition": "A fault of the lab cuts a node or a pod off",
        "fault-loss": "A fault of the lab loses packets",
        "fault-delay": "A fault of the lab delays packets",
        "fault-api": "A fault of the lab keeps the API server down",
        "pod-not-running": "No container of the pod runs",
        "node-process-down": "The node's own process does not run",
        "node-not-ready": "A node with the Service's endpoints is not ready",
        "sender-no-route": "The sender has no route to the destination",
    },
    "The name and the cluster's objects": {
        "dns-name": "The name is not found",
        "wrong-family": "The Service has no endpoint of the packet's IP family",
        "no-such-service": "No Service has the address",
        "duplicate-cluster-ip": "Two Services have the same cluster IP",
        "port-not-served": "The Service has no such port",
        "selector-matches-nothing": "The Service's selector matches no pod",
        "endpoints-missing": "The Service has no EndpointSlices",
        "port-name": "No endpoint has the Service's port by that name",
        "endpoints-not-ready": "The Service's endpoints are not ready",
        "no-endpoints": "The Service has no endpoint, say the rules",
        "local-policy": "The Local policy finds no endpoint on this node",
        "source-range": "The sender is in none of the load balancer's source ranges",
        "health-check": "The load balancer's health check does not get through",
    },
    "What the node remembers": {
        "conntrack-full": "The connection table is full",
        "conntrack-stale": "An old connection entry keeps the flow at a dead endpoint",
        "affinity-dead-pod": "Session affinity keeps the client at a dead endpoint",
    },
    "Who programs the node": {
        "no-proxy": "No Service proxy has programmed this node",
        "two-proxies": "Two Service proxies program this node",
        "two-iptables": "iptables-legacy and iptables-nft both have rules",
        "old-iptables": "An older tool printed the rules of a newer one",
        "rules-not-loaded": "The Service proxy could not write its rules",
        "chain-not-called": "No rule calls a chain that has work to do",
        "stale-rules": "The node's rules do not know what the cluster knows",
        "stale-endpoint": "The rules still send to an endpoint that is gone",
        "node-port-address": "The node port is not open on this address of the node",
        "localhost-node-port": "The node port is not open on localhost",
        "rule-in-the-way": "A rule of another program takes the packet before the Service rules",
        "mark-clash": "Another program uses the proxy's bit of the packet mark",
    },
    "Who drops it": {
        "network-policy": "A network policy drops it",
        "forward-drop": "The FORWARD chain drops it",
        "input-drop": "The node's own firewall drops it",
        "foreign-table": "Another program's nftables table drops it",
        "rule-drops": "A rule of this node drops it",
    },
    "The node's kernel and its routes": {
        "ip-forward-off": "The node does not forward packets",
        "rp-filter": "The reverse path filter throws it away",
        "route-missing": "There is no route to the endpoint",
        "route-forbids": "A route says that the endpoint must not be reached",
        "wrong-pod-route": "The route to the endpoint leads to the wrong node",
        "link-down": "The link that it would leave by is down",
        "neighbour-missing": "The next hop does not respond on the link",
        "fdb-missing": "The overlay does not know where the other node is",
        "mtu": "Large packets do not fit a link on the path",
    },
    "The endpoint and its answer": {
        "not-listening": "The endpoint does not listen on the port",
        "missing-hairpin": "A pod that meets itself is not masqueraded",
        "missing-masquerade": "The answer does not come back by this node",
        "br-netfilter-off": "The answer passes this node's bridge without being rewritten back",
    },
}

CAUSES: dict[str, Cause] = {name: Cause(name, title) for titles in _GROUPS.values() for name, title in titles.items()}

GROUPS: dict[str, tuple[str, ...]] = {title: tuple(titles) for title, titles in _GROUPS.items()}


class CauseFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that was found."""

    cause: Cause
    certain: bool
    """True: nothing else explains what is known. False: it is likely."""
    sentence: str
    """What is wrong, with the names of the objects."""
    evidence: tuple[str, ...] = ()
    """What shows it, as printed by its tool or written in its object."""
    advice: str = ""
    node: str = ""
    explains: bool = True
    """True: it makes this path fail. False: it was noticed, but doesn't affect this path."""


class FindingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finding in a document."""

    cause: str
    """Id of the cause."""
    title: str
    page: str
    certain: bool
    explains: bool
    """False: it does not affect this path, but was noticed."""
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    node: str = ""


def finding_records(findings: Sequence[CauseFinding]) -> tuple[FindingRecord, ...]:
    """Return the findings as parts of a document."""
    return tuple(
        FindingRecord(
            **{name: getattr(each, name) for name in CauseFinding.__struct_fields__ if name != "cause"},
            cause=each.cause.id,
            title=each.cause.title,
            page=each.cause.page,
        )
        for each in findings
    )
