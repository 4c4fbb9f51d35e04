"""Node ports on loopback through a relay, next to the rules of a mode that cannot serve them (row 9.13, KEP-6032)."""

from __future__ import annotations

import logging

from immutables import Map

from narthex.model import IPFamily
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.userspace.backend import RELAYED
from narthex.proxy.backends.userspace.rules import RelayListener, RelayListeners
from narthex.proxy.kernel.kept_relay import KeptRelay
from narthex.proxy.plan.ir import Forward, FrontendKind, Plan
from narthex.proxy.relay.process import RelaySetup
from narthex.proxy.relay.relay import UDP_IDLE_SECONDS
from narthex.proxy.relay.wire import ADDRESS_FAMILIES, PortFailure

HOSTS = {IPFamily.IPV4: "127.0.0.1", IPFamily.IPV6: "::1"}
TEND_SECONDS = 2.0
"""Interval of the relay's liveness check, and of new attempts to open ports that other programs use."""
_MOST_LOGGED = 3

_LOGGER = logging.getLogger("narthex")


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


class LocalhostRelay:
    """The relay of one IP family. Without node ports on loopback, no process runs.

    Not thread-safe; other threads may read `asked`, `listening`, and `failures`.
    """

    def __init__(
        self, family: IPFamily, namespace: str | None = None, *, udp_idle_seconds: float | None = None
    ) -> None:
        """Prepare a relay in a named network namespace; None: that of the calling thread."""
        seconds = UDP_IDLE_SECONDS if udp_idle_seconds is None else udp_idle_seconds
        setup = RelaySetup(ADDRESS_FAMILIES[family.value], udp_idle_seconds=seconds, host=HOSTS[family])
        self._host = HOSTS[family]
        self._relay = KeptRelay(f"localhost {family.label}", setup, namespace)
        self._plan: Plan | None = None
        self._refused: frozenset[tuple[str, int]] = frozenset()
        """Protocol and port of listeners that could not be opened at the last attempt."""
        self.asked = False
        """The plan asks for node ports on loopback."""
        self.failures = 0
        """Listeners that could not be opened, counted once for each attempt."""

    @property
    def listening(self) -> int:
        """Number of open listeners."""
        return len(self._relay.listeners)

    def follow(self, plan: Plan) -> None:
        """Serve the node ports of a plan. Failures are logged and tried again by `tend`."""
        self.asked = plan.node_ports.relayed
        if plan is self._plan:
            return
        self._plan = plan
        self._serve(plan)

    def tend(self) -> float | None:
        """Restart a relay that has died, and try ports again; return the seconds until the next time, None for never."""
        if not self.asked or self._plan is None:
            return None
        if self._refused or not self._relay.alive():
            self._serve(self._plan)
        return TEND_SECONDS

    def close(self) -> None:
        """End the relay, and with it all connections."""
        self._relay.close()
        self._plan = None

    def _serve(self, plan: Plan) -> None:
        desired = localhost_listeners(plan)
        try:
            self._relay.alive()
            held = self._relay.listeners
            self._relay.stop_listening(tuple(key for key in held if key not in desired))
            self._note(self._relay.listen(tuple(one for key, one in desired.items() if held.get(key) != one)))
        except ApplyError as error:
            _LOGGER.warning("node ports on %s: %s", self._host, error)

    def _note(self, failed: tuple[PortFailure, ...]) -> None:
        self.failures += len(failed)
        fresh = [one for one in failed if (one.protocol, one.port) not in self._refused]
        for one in fresh[:_MOST_LOGGED]:
            _LOGGER.warning(
                "node port %d/%s is not served on %s: %s; it is tried again",
                one.port,
                one.protocol,
                self._host,
                one.reason,
            )
        if len(fresh) > _MOST_LOGGED:
            _LOGGER.warning("%d more node ports are not served on %s", len(fresh) - _MOST_LOGGED, self._host)
        self._refused = frozenset((one.protocol, one.port) for one in failed)
