"""The third witness: what the kernel of this machine does to real packets, with the rules of a mode loaded.

Each scenario and mode has a fresh world of namespaces. The witness repeats a flow until every possible target was met, and
enough further draws met nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from narthex.linux.namespaces import in_namespace
from narthex.linux.privileges import kernel_release
from narthex.linux.sysctls import apply_sysctls
from narthex.model import Disposition, EndpointSlice, IPFamily, Protocol, Service, contains, family_of, join_port
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.planner import plan_once
from narthex.testing.findings import DROP, NONE, End, Ends, OutcomeText, WitnessFinding, say, targets_of
from narthex.testing.kernel.client import WitnessError
from narthex.testing.kernel.probe import Call, PacketListeners, ProbeResult, Tap
from narthex.testing.kernel.world import NODE, World, gateways, lay_out
from narthex.testing.pace import Paced, pace
from narthex.testing.scenario import Scenario, ScenarioConnection, ScenarioFlow, ScenarioStep
from narthex.testing.setting import arrival, as_declared, families_of, from_host, node_config, snapshot

SILENCE = 0.3
"""Seconds without any sign that make an expected drop one."""
PATIENCE = 10.0
"""Seconds to wait where something else than silence is expected: longer than a retransmission takes (SCTP: 3), also on a
machine that has much else to do."""
DRAWS_PER_TARGET = 40
"""Upper limit of draws: the probability to miss one of n equal targets in 40 n draws is e^-40."""
FURTHER_DRAWS = 8
"""Minimum draws per target, so that an excess target shows: the probability that it does not is about e^-8."""


class UnexpectedObservation(RuntimeError):
    """An observation that no expectation can express."""


class LoadedRules:
    """The rules of a mode in one namespace, for the families in use."""

    def __init__(self, scenario: Scenario, mode: str, families: tuple[IPFamily, ...], namespace: str) -> None:
        backend = BACKENDS[mode]
        objects, config = snapshot(scenario), node_config(scenario, mode)
        self._loads: dict[IPFamily, tuple[Any, Any]] = {}
        self.relayed: frozenset[tuple[Protocol, int]] = frozenset()
        """Where a relay of the mode listens on the node."""
        with in_namespace(namespace):
            refused = [each for each in apply_sysctls(dataplane(mode).kernel_settings(kernel_release())) if each.error]
        if refused:
            raise UnexpectedObservation(f"{refused[0].setting.path}: {refused[0].error}")
        for family in families:
            rules: Any = backend.render(plan_once(objects, config, family))
            self._loads[family] = dataplane(mode).target(family, namespace), backend.diff(None, rules)
            self.relayed |= frozenset(getattr(rules, "listeners", ()))

    def load(self) -> None:
        """Write the rules to the kernel."""
        for target, changes in self._loads.values():
            target.apply(changes)

    def forget(self, family: IPFamily) -> None:
        """Write the rules of a family again, so that no client's affinity remains."""
        target, changes = self._loads[family]
        target.clean()
        target.apply(changes)

    def remove(self) -> None:
        """Remove the rules from the kernel."""
        for target, _ in self._loads.values():
            target.clean()

    def close(self) -> None:
        """Stop a relay. The rules disappear with their namespace."""
        for target, _ in self._loads.values():
            if hasattr(target, "close"):
                target.close()


def testify(scenario: Scenario, mode: str, flows: tuple[ScenarioFlow, ...]) -> list[WitnessFinding]:
    """Return what the kernel does to the flows and to all steps."""
    flows = as_declared(flows, BACKENDS[mode].deviations)
    connections: tuple[ScenarioConnection, ...] = (*flows, *scenario.steps_in(mode))
    if not connections:
        return []
    with ExitStack() as stack:
        world = stack.enter_context(World(lay_out(scenario, connections)))
        families = families_of(connections)
        ears = stack.enter_context(
            PacketListeners(families, sorted({c.protocol for c in connections}, key=lambda p: p.number))
        )
        listen(scenario, world, ears)
        tap = stack.enter_context(Tap(world.node))
        stand = KernelWitness(scenario, mode, world, ears, tap)
        findings = []
        if flows:
            rules = LoadedRules(scenario, mode, families, world.node)
            stack.callback(rules.close)
            rules.load()
            ears.passed_by = frozenset((NODE, *place) for place in rules.relayed)
            forget = rules.forget if _remembers(scenario) else None
            silent = stand.silent_together(flows)
            findings += [silent.get(flow) or stand.judge_flow(flow, forget) for flow in flows]
            if scenario.steps_in(mode):
                rules.remove()
        if scenario.steps_in(mode):
            paced = pace(scenario, scenario.steps_in(mode))
            rules = LoadedRules(paced.scenario, mode, families, world.node)
            stack.callback(rules.close)
            rules.load()
            ears.passed_by = frozenset((NODE, *place) for place in rules.relayed)
            findings += stand.judge_steps(paced)
        return findings


def listen(scenario: Scenario, world: World, ears: PacketListeners) -> None:
    """Open listeners in all namespaces, and servers at all endpoints."""
    ears.open(NODE, world.node)
    for number, namespace in enumerate(world.sites):
        ears.open(number, namespace)
    for obj in scenario.objects:
        if not isinstance(obj, EndpointSlice) or obj.family is None:
            continue
        for endpoint in obj.endpoints:
            where = NODE if endpoint.address in scenario.node_ips else world.layout.homes.get(endpoint.address)
            for port in obj.ports:
                if where is not None and port.port:
                    ears.answer(world.namespace(where), endpoint.address, port.port, port.protocol)


def _remembers(scenario: Scenario) -> bool:
    return any(obj.affinity_seconds is not None for obj in scenario.objects if isinstance(obj, Service))


class KernelWitness:
    """Opens connections in one world and reports their results."""

    def __init__(self, scenario: Scenario, mode: str, world: World, ears: PacketListeners, tap: Tap) -> None:
        self._scenario, self._mode = scenario, mode
        self.world, self._ears, self._tap = world, ears, tap
        self._masquerades = gateways(world.layout) | set(scenario.node_ips)

    def judge_flow(self, flow: ScenarioFlow, forget: Callable[[IPFamily], None] | None) -> WitnessFinding:
        """Repeat a flow until all its possible results are known."""
        seen: set[End] = set()
        error = ""
        try:
            with self._sending(flow):
                self._draw_all(flow, forget, seen)
        except (UnexpectedObservation, WitnessError) as trouble:
            error = str(trouble)
        said: OutcomeText = {"error": error} if error else say(frozenset(seen))
        return self._finding(flow.label, say(flow.expect), said, not error and frozenset(seen) == flow.expect)

    def silent_together(self, flows: tuple[ScenarioFlow, ...]) -> dict[ScenarioFlow, WitnessFinding]:
        """Judge all expected drops in one wait.

        The result is empty if any of them causes a packet; each must then be judged alone.
        """
        drops = [flow for flow in flows if flow.expect == DROP and self._needs_nothing(flow)]
        self._tap.take()
        try:
            if not drops or not self._ears.silent([self._call(flow) for flow in drops], SILENCE):
                return {}
        except WitnessError:
            return {}
        reached = self._tap.take()
        if any(self._passage(flow) not in reached for flow in drops if arrival(self._scenario, flow)):
            return {}
        return {flow: self._finding(flow.label, say(DROP), say(DROP), True) for flow in drops}

    def _needs_nothing(self, flow: ScenarioFlow) -> bool:
        """Return True if the world can send this flow without changes."""
        interface = arrival(self._scenario, flow)
        if not interface:
            return flow.source in self._scenario.node_ips
        return self.world.layout.senders[flow.source, interface] == self.world.layout.homes[flow.source]

    def _passage(self, connection: ScenarioConnection) -> tuple[str, str, str]:
        """Return what the tap sees of a connection that arrives from outside."""
        return connection.source, connection.destination, arrival(self._scenario, connection)

    def _draw_all(self, flow: ScenarioFlow, forget: Callable[[IPFamily], None] | None, seen: set[End]) -> None:
        """Add the ends of enough draws to `seen`, and stop at the first unexpected one."""
        targets = len(flow.expect)
        single = not targets_of(flow.expect)
        least = 1 if flow.expect == DROP else 3 if single or targets == 1 or forget else FURTHER_DRAWS * targets
        for count in range(1, DRAWS_PER_TARGET * targets + 1):
            if forget and count > 1:
                forget(family_of(flow.destination))
            seen.add(self._draw(flow, flow.expect))
            if not seen <= flow.expect or (seen == flow.expect and count >= least):
                return

    def judge_steps(self, paced: Paced) -> list[WitnessFinding]:
        """Open the connections of the steps at their times."""
        start = time.monotonic()
        picks: dict[int, tuple[str, int]] = {}
        findings = []
        for step, at in zip(paced.steps, paced.times, strict=True):
            time.sleep(max(0.0, start + at - time.monotonic()))
            said: OutcomeText
            try:
                with self._sending(step):
                    said, ok = self._judge_step(step, picks)
            except (UnexpectedObservation, WitnessError) as trouble:
                said, ok = {"error": str(trouble)}, False
            findings.append(self._finding(f"step {step.number}", step.pick, said, ok))
        return findings

    def _judge_step(self, step: ScenarioStep, picks: dict[int, tuple[str, int]]) -> tuple[OutcomeText, bool]:
        """Judge one step. A demand for the same endpoint is repeated, since one match could be luck."""
        before = picks.get(step.refers_to) if step.refers_to is not None else None
        got: dict[str, None] = {}
        for _ in range(4 if step.pick.startswith("same") else 1):
            end = self._draw(step, frozenset())
            picked = end[1]
            if picked is None:
                return say(frozenset({end})), False
            got[join_port(*picked)] = None
            picks[step.number] = picked
            if not step.allows(picked, before):
                return {"dnat": list(got), "before": join_port(*before) if before else "nothing"}, False
        return {"dnat": list(got)}, True

    def _sending(self, connection: ScenarioConnection) -> ExitStack:
        """Enable the source to send, for the duration of the block."""
        stack = ExitStack()
        source = connection.source
        if from_host(self._scenario, connection):
            loopback = contains(family_of(source).loopback, source)
            if source not in self._scenario.node_ips and not loopback:
                self.world.lend(source)
                stack.callback(self.world.take_back, source)
        else:
            self.world.turn_home(address for address, _ in self.world.layout.senders)
            self.world.turn_to(source, arrival(self._scenario, connection))
        return stack

    def _call(self, connection: ScenarioConnection) -> Call:
        interface = arrival(self._scenario, connection)
        sender = self.world.layout.senders[connection.source, interface] if interface else NODE
        return Call(
            self.world.namespace(sender),
            connection.source,
            connection.destination,
            connection.port,
            connection.protocol,
        )

    def _draw(self, connection: ScenarioConnection, expected: Ends) -> End:
        """Open one connection. Raises UnexpectedObservation for what no expectation can express."""
        interface = arrival(self._scenario, connection)
        loopback = contains(family_of(connection.destination).loopback, connection.destination)
        nowhere = bool(interface) and loopback and expected == NONE
        if expected == DROP:
            self._tap.take()
        result = self._ears.connect(self._call(connection), SILENCE if nowhere or expected == DROP else PATIENCE)
        if result.arrivals:
            return self._arrived(connection, result, expected)
        if result.refusal in ("port unreachable", "refused"):
            return Disposition.REJECTED, None, False
        if result.refusal:
            raise UnexpectedObservation(f"refused, but by {result.refusal}")
        if nowhere:
            # Routing has no place for loopback addresses from outside: left alone, such a packet ends in silence.
            return Disposition.NOT_OURS, None, False
        if interface and expected == DROP and self._passage(connection) not in self._tap.take():
            raise UnexpectedObservation(f"the packet never reached the node's interface {interface}")
        return Disposition.DROPPED, None, False

    def _arrived(self, connection: ScenarioConnection, result: ProbeResult, expected: Ends) -> End:
        places = {(each.destination, each.port) for each in result.arrivals}
        if len(places) != 1:
            raise UnexpectedObservation(
                f"arrived at {len(places)} places: {', '.join(sorted(join_port(*p) for p in places))}"
            )
        arrival_ = result.arrivals[0]
        place = (arrival_.destination, arrival_.port)
        rewritten = arrival_.source != connection.source
        if rewritten and arrival_.source not in self._masquerades:
            raise UnexpectedObservation(
                f"{join_port(*place)} saw the source {arrival_.source}, which is not the node's"
            )
        if place == (connection.destination, connection.port) and place not in targets_of(expected):
            return Disposition.NOT_OURS, None, rewritten
        if arrival_.site == NODE and place in targets_of(expected):
            # Delivered on the node itself: a packet from outside never meets postrouting, and one of the node's own
            # keeps a source that is the node's either way. Whether it was marked cannot be seen.
            rewritten = (Disposition.DELIVERED, place, True) in expected
        # Who talks to itself is not waited for: see Ears.
        to_itself = arrival_.source == arrival_.destination
        if not result.answered and not to_itself and self._must_answer(connection, place, rewritten):
            raise UnexpectedObservation(f"{join_port(*place)} got it, but no answer came back")
        return Disposition.DELIVERED, place, rewritten

    def _must_answer(self, connection: ScenarioConnection, place: tuple[str, int], rewritten: bool) -> bool:
        """Return True if an answer can find its way, which it cannot if a remote pod met itself with its source kept."""
        if place[0] == connection.source and not rewritten:
            return False
        return self._ears.answers(*place, connection.protocol)

    def _finding(self, label: str, expect: OutcomeText, got: OutcomeText, ok: bool) -> WitnessFinding:
        return WitnessFinding(
            scenario=self._scenario.name, label=label, mode=self._mode, against="kernel", expect=expect, got=got, ok=ok
        )
