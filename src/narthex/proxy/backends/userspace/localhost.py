"""The relay's table for node ports on loopback, in modes whose rules cannot serve them (row 9.13)."""

from __future__ import annotations

from immutables import Map

from narthex.proxy.backends.userspace.backend import RELAYED
from narthex.proxy.backends.userspace.rules import RelayListener, RelayListeners
from narthex.proxy.plan.ir import Forward, FrontendKind, Plan


def localhost_listeners(plan: Plan) -> RelayListeners:
    """Return a listener for each node port that senders outside of the cluster may reach; none if the plan asks for none.

    As in kube-proxy, Local policy counts for clients on the node, too: without an endpoint here, nothing listens.
    """
    if not plan.node_ports.relayed:
        return Map()
    found = {}
    for name, service in plan.services.items():
        for frontend in service.frontends:
            if frontend.kind is not FrontendKind.NODE_PORT or name.protocol not in RELAYED:
                continue
            if isinstance(frontend.other, Forward):
                scope = frontend.other.scope
                listener = RelayListener(
                    name=name,
                    scope=scope,
                    port=frontend.port,
                    endpoints=tuple((each.address, each.port) for each in service.pool(scope).endpoints),
                    affinity_seconds=service.affinity_seconds,
                )
                found[listener.key] = listener
    return Map(found)
