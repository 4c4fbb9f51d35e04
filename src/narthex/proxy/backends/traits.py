"""The answers of the modes to the questions of `narthex.proxy.backends.base`, for comparison in one place."""

from __future__ import annotations

from collections.abc import Mapping

from narthex.proxy.backends.base import Trait
from narthex.proxy.backends.nftables.affinity import MOST_CLIENTS

Traits = Mapping[Trait, str]

_IN_THE_KERNEL: Traits = {
    Trait.CHOICE: "at random, each endpoint as likely as the others",
    Trait.RETRY: "the connection fails; it is for the client to try again",
    Trait.CONNECTIONS: "the kernel's connection tracking: they outlive rules, proxy and mode",
    Trait.RESTART: "nothing",
    Trait.LEAVING: "gets nothing new; TCP and SCTP connections go on while a slice names it, UDP clients draw anew",
    Trait.IDLE: "as connection tracking is set (`conntrack` of the configuration)",
    Trait.VISIBLE: "nothing: no address is added, no port is open",
}
"""Answers that modes share if their rules rewrite addresses in the kernel."""

NFTABLES: Traits = {
    **_IN_THE_KERNEL,
    Trait.AFFINITY: f"sets of the table narthex, at most {MOST_CLIENTS:,} clients for each endpoint; "
    "another mode's memory is not taken over",
    Trait.INVALID: "pass; only the reset that answers one is dropped, so that the endpoint's connection lives on",
    Trait.FIREWALL: "nothing is opened: what another table drops stays dropped",
    Trait.NEEDS: "Linux 5.13 and nft 1.0.1, or newer",
}

USERSPACE: Traits = {
    Trait.CHOICE: "in turn, in an order that is drawn anew when the endpoints change",
    Trait.RETRY: "the next endpoint is tried; the client waits a little longer and sees no error",
    Trait.AFFINITY: "the relay's memory; lost when the proxy restarts",
    Trait.CONNECTIONS: "the relay, a process of the proxy's: they end when it does",
    Trait.RESTART: "open connections, and new ones until the proxy listens again",
    Trait.LEAVING: "gets nothing new; TCP connections go on until an end closes, UDP clients go to another endpoint",
    Trait.IDLE: "TCP: as long as both ends live; UDP: as configured (`udpIdleTimeout`), 30 s by default",
    Trait.INVALID: "never reach the endpoint: its connection is with the node",
    Trait.FIREWALL: "the relay's ports and health-check node ports are accepted",
    Trait.VISIBLE: "open ports of the relay, which refuse connections that do not come through a Service",
    Trait.NEEDS: "iptables, over nf_tables or legacy",
}

IPTABLES: Traits = {
    **_IN_THE_KERNEL,
    Trait.AFFINITY: "xt_recent lists, one for each endpoint, with as many clients as the module is loaded for "
    "(100 by default); another mode's memory is not taken over",
    Trait.INVALID: "are dropped where they are forwarded",
    Trait.FIREWALL: "forwarded packets to be masqueraded, those of their connections, and health-check node ports are "
    "accepted",
    Trait.NEEDS: "iptables, over nf_tables or legacy",
}

IPVS: Traits = {
    **_IN_THE_KERNEL,
    Trait.CHOICE: "as the scheduler says (`ipvs.scheduler`): round robin by default",
    Trait.AFFINITY: "IPVS' persistence, for each address and port apart; another mode's memory is not taken over",
    Trait.CONNECTIONS: "IPVS' connection table: they outlive the proxy, and end when the mode is left",
    Trait.LEAVING: "gets nothing new; TCP connections go on until they end, UDP and SCTP clients draw anew",
    Trait.IDLE: "as IPVS is set (`ipvs.tcpTimeout` and the like), 15 minutes for TCP by default",
    Trait.INVALID: "pass",
    Trait.FIREWALL: "the packets of connections to Services and health-check node ports are accepted",
    Trait.VISIBLE: "the Services' addresses, on the link kube-ipvs0",
    Trait.NEEDS: "Linux with IP_VS, the scheduler's module, dummy links and ipset; iptables, over nf_tables or legacy",
}
