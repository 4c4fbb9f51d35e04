"""All causes, in the order in which a packet would meet them. The pages and their index are held to this table."""

from __future__ import annotations

from narthex.trace.causes.finding import Cause

_GROUPS: dict[str, dict[str, str]] = {
    "The name and the cluster's objects": {
        "dns-name": "The name is not found",
        "wrong-family": "The Service has no endpoint of the packet's IP family",
        "no-such-service": "No Service has the address",
        "duplicate-cluster-ip": "Two Services have the same cluster IP",
        "port-not-served": "The Service has no such port",
        "selector-matches-nothing": "The Service's selector matches no pod",
        "endpoints-missing": "Nobody has made endpoints for the Service",
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
        "stale-rules": "The node's rules do not know what the cluster knows",
        "stale-endpoint": "The rules still send to an endpoint that is gone",
        "node-port-address": "The node port is not open on this address of the node",
        "localhost-node-port": "The node port is not open on localhost",
        "rule-in-the-way": "Somebody else's rule takes the packet before the Service's rules",
        "mark-clash": "Somebody else uses the proxy's bit of the packet mark",
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
        "neighbour-missing": "Nobody on the link answers for the next hop",
        "fdb-missing": "The overlay does not know where the other node is",
        "mtu": "Large packets do not fit a link on the way",
    },
    "The endpoint and its answer": {
        "not-listening": "The endpoint does not listen on the port",
        "missing-hairpin": "A pod that meets itself is not masqueraded",
        "missing-masquerade": "The answer does not come back by this node",
        "br-netfilter-off": "The answer passes this node's bridge without being rewritten back",
    },
}

CAUSES: dict[str, Cause] = {name: Cause(name, title) for titles in _GROUPS.values() for name, title in titles.items()}
"""By id."""

GROUPS: dict[str, tuple[str, ...]] = {title: tuple(titles) for title, titles in _GROUPS.items()}
"""Ids by the groups' headings."""
