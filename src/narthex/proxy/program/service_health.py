"""Health check node ports: which load balancers may send traffic of a Service to this node (rows of group 16).

A load balancer that preserves client addresses must send only to nodes with an endpoint of the Service. It asks each
node at `healthCheckNodePort`. This module opens and closes these ports and answers there.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from narthex.linux.addresses import OwnAddress, own_addresses
from narthex.model import IPFamily, NamespacedName, in_any, is_zero_prefix, join_port
from narthex.proxy.plan.ir import NodePorts, Plan, ServiceHealthCheck
from narthex.runtime.http import HttpRequest, HttpResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.logs import LOGGER, data

AGAIN_SECONDS = 5.0
"""Period at which taken ports are retried and the node's addresses are read."""

_Claims = Mapping[int, tuple[NamespacedName, ServiceHealthCheck]]
"""The owner of each port."""


class HealthCheckAddress(NamedTuple):
    """An address of a health check port. Link-local IPv6 addresses include the interface: `fe80::1%2`."""

    address: str
    port: int

    def __str__(self) -> str:
        return join_port(*self)


class _Rival(NamedTuple):
    """Two Services with the same port number."""

    port: int
    winner: NamespacedName
    loser: NamespacedName


class _Family:
    """Listeners and answers of one IP family."""

    def __init__(self) -> None:
        self.checks: Mapping[NamespacedName, ServiceHealthCheck] = {}
        self.claims: _Claims = {}
        """Replaced as a whole, since the server's thread reads it at any time."""
        self.open: dict[HealthCheckAddress, socket.socket] = {}
        self.missing: dict[HealthCheckAddress, tuple[NamespacedName, str]] = {}
        """Addresses that could not be opened, with the Service and the reason."""
        self.rivals: frozenset[_Rival] = frozenset()


class ServiceHealth:
    """The health check node ports of a proxy. The loop owns it; only answers are made in the server's thread."""

    def __init__(
        self,
        http: HttpServer,
        healthy: Callable[[], bool],
        addresses: Callable[[], Iterable[OwnAddress]] = own_addresses,
        listen: Callable[[str, int], socket.socket] = listen_tcp,
        tell: Callable[[NamespacedName, str], object] = lambda name, note: None,  # noqa: ARG005
    ) -> None:
        """Prepare the ports.

        `healthy` returns the proxy's health for each answer (row 17.1). `tell` receives each Service whose port
        cannot be opened, and the reason (row 16.7).
        """
        self._http = http
        self._healthy = healthy
        self._addresses = addresses
        self._listen = listen
        self._tell = tell
        self._families: dict[IPFamily, _Family] = {}

    def follow(self, plan: Plan) -> float:
        """Listen and answer as a plan in force requires (row 16.8).

        Returns the seconds until the next call. Call it repeatedly, since ports may become free and addresses may be
        added (rows 16.6, 16.7). Without changes it costs nothing.
        """
        state = self._families.setdefault(plan.family, _Family())
        fixed = _everywhere(plan.node_ports)
        if plan.health_checks is state.checks and fixed and not state.missing:
            return math.inf
        if plan.health_checks is not state.checks:
            claims, rivals = _settle(plan.health_checks)
            self._report_rivals(plan.family, rivals)
        else:
            claims = state.claims
        found = self._own(plan) if claims else ()
        if found is None:
            return AGAIN_SECONDS
        desired = {HealthCheckAddress(address, port) for address in found for port in claims}
        self._close(state, desired)
        state.checks, state.claims = plan.health_checks, claims
        self._open(plan.family, desired)
        return AGAIN_SECONDS if state.missing or (claims and not fixed) else math.inf

    def _own(self, plan: Plan) -> tuple[str, ...] | None:
        """Return the addresses to listen on, or None if the kernel does not report them."""
        if _everywhere(plan.node_ports):
            return ("::" if plan.family is IPFamily.IPV6 else "0.0.0.0",)
        try:
            own = self._addresses()
        except OSError as error:
            LOGGER.warning("this node's addresses are not known: %s; health check node ports stay", error.strerror)
            return None
        return tuple(
            f"{each.address}%{each.interface}" if in_any(("fe80::/10",), each.address) else each.address
            for each in own
            if each.family is plan.family and in_any(plan.node_ports.cidrs or (), each.address)
        )

    def _close(self, state: _Family, desired: set[HealthCheckAddress]) -> None:
        for place in state.open.keys() - desired:
            self._http.close(state.open.pop(place))
        for place in state.missing.keys() - desired:
            del state.missing[place]

    def _open(self, family: IPFamily, desired: set[HealthCheckAddress]) -> None:
        state = self._families[family]
        for place in sorted(desired - state.open.keys()):
            name = state.claims[place.port][0]
            try:
                sock = self._listen(place.address, place.port)
            except OSError as error:
                self._report_missing(state, place, name, error)
                continue
            self._http.open(sock, self._answering(state, place.port))
            state.open[place] = sock
            if state.missing.pop(place, None) is not None:
                LOGGER.info("Service %s: health check node port %s is open now", name, place)

    def _answering(self, state: _Family, port: int) -> Callable[[HttpRequest], HttpResponse]:
        def answer(request: HttpRequest) -> HttpResponse:  # noqa: ARG001 - any path and any method (row 16.5)
            """Return 200 if the Service has local endpoints and this proxy is healthy, otherwise 503.

            Return 404 if no Service has the port any more.
            """
            claim = state.claims.get(port)
            if claim is None:
                # The connection was made before the port was closed.
                return HttpResponse(404, b"no Service has this health check node port any more\n")
            name, check = claim
            healthy = self._healthy()
            body = {
                "service": {"namespace": name.namespace, "name": name.name},
                "localEndpoints": check.local_ready,
                "serviceProxyHealthy": healthy,
            }
            return HttpResponse(
                200 if healthy and check.local_ready else 503,
                msgspec.json.encode(body),
                "application/json",
                (("X-Load-Balancing-Endpoint-Weight", str(check.local_ready)),),
            )

        return answer

    def _report_missing(self, state: _Family, place: HealthCheckAddress, name: NamespacedName, error: OSError) -> None:
        reason = error.strerror or str(error)
        if state.missing.get(place) == (name, reason):
            return
        state.missing[place] = name, reason
        self._tell(name, f"node cannot listen on health check node port {place}: {reason}")
        LOGGER.warning(
            "Service %s: cannot listen on health check node port %s: %s; balancers take this node to be without "
            "endpoints of it; it is tried again at every sync; stop what else listens there",
            name,
            place,
            reason,
            extra=data(object=f"Service {name}", port=place.port),
        )

    def _report_rivals(self, family: IPFamily, present: frozenset[_Rival]) -> None:
        state = self._families[family]
        before, state.rivals = state.rivals, present
        # Both families have the same ports mostly; once is enough.
        others = {each for other in self._families.values() if other is not state for each in other.rivals}
        for port, winner, loser in sorted(present - before - others):
            LOGGER.warning(
                "Service %s cannot have health check node port %d: Service %s has it; give one of the two another port",
                loser,
                port,
                winner,
                extra=data(object=f"Service {loser}", port=port),
            )
        for port, _, loser in sorted(before - present - others):
            LOGGER.info("settled: Service %s has no rival for health check node port %d any more", loser, port)


def _everywhere(node_ports: NodePorts) -> bool:
    return node_ports.cidrs is None or any(map(is_zero_prefix, node_ports.cidrs))


def _settle(checks: Mapping[NamespacedName, ServiceHealthCheck]) -> tuple[_Claims, frozenset[_Rival]]:
    """Return the owner of each port, which is the first Service by name, and the other Services that requested it."""
    claims: dict[int, tuple[NamespacedName, ServiceHealthCheck]] = {}
    rivals = []
    for name in sorted(checks):
        check = checks[name]
        winner, _ = claims.setdefault(check.port, (name, check))
        if winner != name:
            rivals.append(_Rival(check.port, winner, name))
    return claims, frozenset(rivals)
