"""The proxy's log: each problem is logged once when it appears and once when it is resolved."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from narthex.kube.events import ClusterEvent, balancing_not_applied, change_refused, source_problem
from narthex.model import EventProblem, IPFamily, NamespacedName, Problem, Service, ServicePortName, Snapshot
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.iptables.rules import XtablesChanges
from narthex.proxy.backends.ipvs.rules import IpvsChanges
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.backends.userspace.rules import UserspaceChanges
from narthex.proxy.plan.ir import FrontendConflict
from narthex.proxy.plan.show import claim_text, counted
from narthex.proxy.program.sync import API_SERVER, SyncResult
from narthex.proxy.verification import RefusedChanges
from narthex.runtime.logs import LOGGER, ProblemLog, data

_NAMES_SHOWN = 3


class SyncReporter:
    """Logs problems and syncs. Remembers what was logged; not thread-safe."""

    def __init__(
        self, node_name: str, families: int, record: Callable[[ClusterEvent], object] = lambda _: None
    ) -> None:
        self._node_name = node_name
        self._record = record
        self._families = families
        self._ready: list[IPFamily] = []
        self._problems = ProblemLog()
        self._conflicts: dict[IPFamily, tuple[FrontendConflict, ...]] = {}
        self._failing: dict[IPFamily, str] = {}
        self._contests: dict[IPFamily, int] = {}
        self._doubted: set[IPFamily] = set()
        self._refused: dict[IPFamily, RefusedChanges] = {}
        self._undecided: dict[IPFamily, frozenset[ServicePortName]] = {}
        self._node_known: bool | None = None
        self._unchecked: set[NamespacedName] = set()

    def problems(self, present: Sequence[Any]) -> None:
        """Log new and resolved problems of objects, and record the Events of new ones that have a reason for one."""
        for problem in self._problems.update(present):
            if isinstance(problem, EventProblem):
                self._record(source_problem(self._node_name, problem.reason, problem.message))

    def node(self, snapshot: Snapshot) -> None:
        """Log whether this node has a Node object."""
        if not snapshot.synced:
            return
        known = NamespacedName("", self._node_name) in snapshot.nodes
        if known is self._node_known:
            return
        if not known:
            others = [key.name for key in snapshot.nodes]
            LOGGER.warning(
                "no Node object is named %r (%s): it has no zone, no podCIDRs and no InternalIP, and only endpoints "
                "whose nodeName is %r count as local; add the Node or correct --hostname-override",
                self._node_name,
                f"there are: {_some(others)}" if others else "there are none at all",
                self._node_name,
            )
        elif self._node_known is not None:
            LOGGER.info("the Node object %r is there now", self._node_name)
        self._node_known = known

    def health_check_ports(self, snapshot: Snapshot, changed: Iterable[NamespacedName]) -> None:
        """Log Services that need a health check node port and lack one (row 16.1)."""
        for name in sorted(changed):
            service = snapshot.services.get(name)
            needs = service is not None and service.type == "LoadBalancer" and service.external_policy_local
            if service is None or not needs or service.health_check_node_port:
                self._unchecked.discard(name)
            elif name not in self._unchecked:
                self._unchecked.add(name)
                LOGGER.warning(
                    "Service %s has no healthCheckNodePort, so balancers cannot ask which nodes have endpoints of it; "
                    "give it one",
                    name,
                    extra=data(object=f"Service {name}"),
                )

    def failed(self, family: IPFamily, error: Exception, wait: float) -> None:
        """Log a failed sync."""
        if isinstance(error, ApplyError):
            what = f"the kernel did not take the {family.label} rules: {error}"
        else:
            what = f"the {family.label} sync broke off: {type(error).__name__}: {error}"
        LOGGER.error(
            "%s; the rules that were there stay in force; the next try is in %.3g s",
            what,
            wait,
            extra=data(family=family.label, retrySeconds=wait),
        )
        LOGGER.debug("where the %s sync broke off", family.label, exc_info=error)
        self._failing[family] = str(error)

    def synced(self, done: SyncResult) -> None:
        """Log a successful sync."""
        family = done.family
        if self._failing.pop(family, None) is not None:
            LOGGER.info("the %s sync works again", family.label)
        if done.drift:
            LOGGER.warning("another program changed our %s rules; they are repaired", family.label)
        words = written(done.changes)
        log = LOGGER.info if done.wrote or done.first else LOGGER.debug
        log(
            "synced %s in %s (%s): %s; %s",
            family.label,
            _time(done.total),
            ", ".join(f"{phase} {_time(seconds)}" for phase, seconds in done.seconds.items()),
            _subject(done),
            words or ("written" if done.wrote else "nothing to write"),
            extra=data(
                family=family.label,
                seconds=done.seconds,
                changed=len(done.changed),
                servicePorts=len(done.plan.services),
                wrote=done.wrote,
                written=words,
            ),
        )
        self._report_conflicts(family, done.plan.conflicts)
        if family not in self._ready:
            self._ready.append(family)
            if len(self._ready) == self._families:
                names = " and ".join(sorted(each.label for each in self._ready))
                LOGGER.info("ready: the first sync is done (%s)", names, extra=data(ready=True))

    def verified(self, done: SyncResult, snapshot: Snapshot) -> None:
        """Log what a verifier refused or left undecided, once each, and record Events of refusals."""
        family, now = done.family, done.refused
        before = self._refused.pop(family, None)
        if now is not None:
            self._refused[family] = now
            if now != before:
                self._refusal(family, now, snapshot)
        elif before is not None:
            LOGGER.info("no %s change is refused any more", family.label)
        if now is not None and now.everything:
            return
        new = done.undecided - self._undecided.get(family, frozenset())
        self._undecided[family] = done.undecided
        if new:
            LOGGER.warning(
                "%s (%s) are written without a proof, because a hash of the client's address selects their endpoints: %s",
                counted(len(new), "Service port"),
                family.label,
                _some([str(name) for name in new]),
            )

    def _refusal(self, family: IPFamily, refused: RefusedChanges, snapshot: Snapshot) -> None:
        names = _some([str(name) for name in refused.services]) or "all Services"
        kept = (
            "no change is written"
            if refused.everything
            else "they keep their earlier rules, and all others are up to date"
        )
        note = (
            f"the {family.label} changes of {names} are refused, because the rules would not do what the objects mean: {refused.reason}; "
            f"{kept}; please report this with the objects of these Services, and use another --proxy-mode, or no --verify, meanwhile"
        )
        services = {name.service for name in refused.services}
        LOGGER.error("%s", note, extra=data(family=family.label, object=f"Service {min(services)}" if services else ""))
        if refused.everything:
            self._record(source_problem(self._node_name, "ChangesRefused", note))
            return
        for name in sorted(services):
            service = snapshot.services.get(name)
            self._record(change_refused(name, service.uid if service is not None else "", note))

    def doubted(self, family: IPFamily, seconds: float) -> None:
        """Log that the first lists have no Services although the kernel has, and record an Event."""
        if family in self._doubted:
            return
        self._doubted.add(family)
        note = (
            f"the lists of the source have no Services, but the {family.label} rules of an earlier proxy serve some; these "
            f"rules stay in force for {seconds:.3g} s, or until a Service with endpoints is listed; check whether the API server lost its data"
        )
        LOGGER.error("%s", note)
        self._record(source_problem(self._node_name, "ObjectsMissingFromList", note))

    def contested(self, family: IPFamily, repairs: int) -> None:
        """Log that another program competes for our rules, and when it stopped. `repairs`: since it began."""
        before, self._contests[family] = self._contests.get(family, 0), repairs
        if repairs and not before:
            LOGGER.error(
                "another program changes our %s rules again and again, so they are repaired less often from now on unless "
                "some are missing; look for a second service proxy on this node, and stop one of the two",
                family.label,
            )
        elif before and not repairs:
            LOGGER.info("no other program changes our %s rules again and again any more", family.label)

    def _report_conflicts(self, family: IPFamily, present: tuple[FrontendConflict, ...]) -> None:
        before = self._conflicts.get(family, ())
        if before is present:
            return
        # A node port is claimed in both families alike; once is enough.
        others = {each for other, held in self._conflicts.items() if other is not family for each in held}
        for conflict in present:
            if conflict not in before and conflict not in others:
                LOGGER.warning("%s", _claimed_twice(conflict), extra=data(winner=str(conflict.winner)))
        for conflict in before:
            if conflict not in present and conflict not in others:
                LOGGER.info("settled: %s has no rival for %s any more", conflict.loser, claim_text(conflict))
        self._conflicts[family] = present


def written(changes: Any) -> str:
    """Return the numbers of written rules; empty if nothing was written or the type of changes has no numbers."""
    if not changes:
        return ""
    match changes:
        case NftChanges():
            chains = len(changes.chains) + len(changes.late_chains) + len(changes.removed_chains)
            parts = [
                counted(changes.element_count(), "element"),
                counted(chains, "chain"),
                counted(len(changes.sets) + len(changes.removed_sets), "set"),
            ]
        case XtablesChanges():
            chains = sum(map(len, changes.written.values()))
            removed = sum(map(len, changes.removed.values()))
            parts = [counted(changes.rules, "rule"), counted(chains, "chain"), counted(removed, "chain") + " removed"]
        case IpvsChanges():
            virtual = len(changes.servers_added) + len(changes.servers_edited) + len(changes.servers_removed)
            real = sum(len(one.added) + len(one.edited) + len(one.removed) for one in changes.reals.values())
            entries = sum(len(one.added) + len(one.removed) for one in changes.entries.values())
            entries += sum(len(one.entries) for one in changes.sets_added)
            parts = [
                counted(virtual, "virtual server"),
                counted(real, "real server"),
                counted(entries, "set entry", "set entries"),
                counted(changes.tables.rules, "rule"),
            ]
        case UserspaceChanges():
            ports = counted(len(changes.listen), "listener"), counted(len(changes.close), "listener") + " closed"
            said = ", ".join(part for part in ports if not part.startswith("0 "))
            return "; ".join(filter(None, (said, written(changes.tables))))
        case _:
            return ""
    said = ", ".join(part for part in parts if not part.startswith("0 ")) or "settings only"
    return f"everything anew: {said}" if changes.replace else f"wrote {said}"


def _claimed_twice(conflict: FrontendConflict) -> str:
    return (
        f"Service port {conflict.loser} cannot have {claim_text(conflict)}: {conflict.winner} has it; "
        f"give one of the two another address or port"
    )


def _subject(done: SyncResult) -> str:
    total = f"{counted(len(done.plan.services), 'Service port')}"
    if done.first or not done.changed:
        return total
    names = _some([str(name) for name in done.changed])
    return f"{counted(len(done.changed), 'Service port')} changed ({names}) of {total}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(heapq.nsmallest(_NAMES_SHOWN, names)) + (f" and {rest} more" if rest > 0 else "")


def _time(seconds: float) -> str:
    """Return a duration with three digits, in ms or s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


class ExternalIPReporter:
    """Warns of external IPs that are addresses of this node or of API servers.

    Such Services work as in kube-proxy: many clusters use addresses of nodes on purpose. But a user who may create a Service
    thereby takes over connections to that address from this node and its pods.
    """

    def __init__(self, node_name: str) -> None:
        self._node = NamespacedName("", node_name)
        self._taken: dict[str, str] = {}
        """Address to what has it."""
        self._api_ports: frozenset[int] = frozenset()
        self._found: dict[NamespacedName, tuple[Problem, ...]] = {}
        self._log = ProblemLog()

    def update(self, snapshot: Snapshot, changed: Iterable[NamespacedName]) -> None:
        """Log new and resolved warnings, given the Services that changed."""
        node = snapshot.nodes.get(self._node)
        slices = snapshot.slices.get(API_SERVER)
        servers = slices.ordered if slices is not None else ()
        taken = dict.fromkeys((*node.internal_ips, *node.external_ips), "an address of this node") if node else {}
        taken |= {each.address: "the address of an API server" for one in servers for each in one.endpoints}
        ports = frozenset(port.port for one in servers for port in one.ports if port.port)
        if (taken, ports) != (self._taken, self._api_ports):
            self._taken, self._api_ports = taken, ports
            changed = snapshot.services
        before = dict(self._found)
        for name in changed:
            self._found.pop(name, None)
            service = snapshot.services.get(name)
            if service is not None and (problems := tuple(self._problems(service))):
                self._found[name] = problems
        if self._found != before:
            self._log.update([problem for name in sorted(self._found) for problem in self._found[name]])

    def _problems(self, service: Service) -> Iterator[Problem]:
        for ip in service.external_ips:
            if (what := self._taken.get(ip)) is None:
                continue
            ports = [each.port for each in service.ports]
            api = "API" in what and self._api_ports.intersection(ports)
            yield Problem(
                origin=service.origin,
                object=f"Service {service.key}",
                field="spec.externalIPs",
                message=f"{ip} is {what}: connections to ports {_some([str(port) for port in ports])} of it go to this Service"
                + (", also those to the API server" if api else "")
                + "; forbid such Services with admission control, or all external IPs with the gate "
                "AllowServiceExternalIPs=false",
                severity="error" if api else "warning",
            )


class BalancingReporter:
    """Reports each Service whose request for another way to select endpoints has no effect, in the log and as an Event.

    `problem` returns what is wrong with the request of a Service; empty if nothing is.
    """

    def __init__(self, problem: Callable[[Service], str], record: Callable[[ClusterEvent], object]) -> None:
        self._problem = problem
        self._record = record
        self._said: dict[NamespacedName, str] = {}

    def update(self, snapshot: Snapshot, changed: Iterable[NamespacedName]) -> None:
        """Report new and resolved problems of the Services that changed."""
        for name in sorted(changed):
            service = snapshot.services.get(name)
            problem = self._problem(service) if service is not None and service.annotations else ""
            before = self._said.pop(name, "")
            if problem:
                self._said[name] = problem
            if service is not None and problem and problem != before:
                LOGGER.warning("Service %s: %s", name, problem, extra=data(object=f"Service {name}"))
                self._record(balancing_not_applied(name, service.uid, f"Service {name}: {problem}"))
            elif before and not problem:
                LOGGER.info("Service %s: its request for load balancing is no problem any more", name)


class UnservedReporter:
    """Reports each unserved Service port once.

    `known` returns the Service ports of a family that the rules in force refuse, with the reason.
    """

    def __init__(self, known: Callable[[IPFamily], Mapping[ServicePortName, str]]) -> None:
        self._known = known
        self._said: dict[IPFamily, Mapping[ServicePortName, str]] = {}

    def after(self, done: SyncResult) -> None:
        """Report changes after a successful sync."""
        family = done.family
        now, before = self._known(family), self._said.get(family, {})
        for name, reason in now.items():
            if before.get(name) != reason:
                LOGGER.warning(
                    "Service port %s (%s, %s) is refused: %s",
                    name,
                    name.protocol.value,
                    family.label,
                    reason,
                    extra=data(object=f"Service {name.service}"),
                )
        for name in before:
            if name not in now:
                LOGGER.info("Service port %s (%s, %s) is not refused any more", name, name.protocol.value, family.label)
        self._said[family] = now
