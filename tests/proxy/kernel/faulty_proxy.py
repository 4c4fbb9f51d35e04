"""The command line with a fault: for Services with one certain endpoint, both rule backends send connections to a wrong port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from narthex.cli import main
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Endpoint, Lineage, Plan, Pool, ServicePlan

SPOILED = "10.64.1.17"
Advance = Callable[..., Any]


def _spoiled(service: ServicePlan) -> ServicePlan:
    pool = service.cluster
    if pool is None or all(end.address != SPOILED for end in pool.endpoints):
        return service
    ends = tuple(Endpoint(end.address, end.port + 1, end.local) for end in pool.endpoints)
    return msgspec.structs.replace(service, cluster=Pool(endpoints=ends))


def _wrong(advance: Advance) -> Advance:
    def wrong(previous: Any, plan: Plan) -> Any:
        services = {name: _spoiled(service) for name, service in plan.services.items()}
        if any(service is not plan.services[name] for name, service in services.items()):
            plan = msgspec.structs.replace(plan, services=services, lineage=Lineage())
        return advance(previous, plan)

    return wrong


if __name__ == "__main__":
    for mode in ("nftables", "iptables"):
        backend: Any = BACKENDS[mode]
        backend.advance = _wrong(backend.advance)
    main()
