"""The two witnesses that need no kernel: the plan evaluated, and the rendered rules walked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec

from narthex.model import Disposition, Host, IPFamily, Memory, Outcome, Packet, Trace, family_of, join_port
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import plan_once
from narthex.testing.findings import OutcomeText, WitnessFinding, possible_ends, say, say_trace
from narthex.testing.scenario import Scenario, ScenarioFlow, ScenarioStep
from narthex.testing.setting import as_declared, families_of, host_of, node_config, packet_of, snapshot
from narthex.trace.evaluate import evaluate

Answer = Callable[[Packet, Host, Memory | None, float], Trace]
"""One witness's way of following a packet."""

BRANCHES = 48
"""How many different histories of steps are followed side by side. Two endpoints and five free picks fit."""


def _plans(scenario: Scenario, mode: str) -> dict[IPFamily, Plan]:
    objects, config = snapshot(scenario), node_config(scenario, mode)
    return {family: plan_once(objects, config, family) for family in families_of((*scenario.flows, *scenario.steps))}


def plan_answer(scenario: Scenario, mode: str) -> Answer:
    """Return the answer of the plan, adapted to the deviations of the mode's backend."""
    backend, plans = BACKENDS[mode], _plans(scenario, mode)

    def answer(packet: Packet, host: Host, memory: Memory | None, now: float) -> Trace:
        """Evaluate the plan of the packet's address family."""
        return evaluate(plans[family_of(packet.destination)], packet, host, backend.deviations, memory, now)

    return answer


def rules_answer(scenario: Scenario, mode: str) -> Answer:
    """Return the answer of the rendered rules, walked like the kernel does."""
    backend = BACKENDS[mode]
    rules = {family: backend.render(plan) for family, plan in _plans(scenario, mode).items()}

    def answer(packet: Packet, host: Host, memory: Memory | None, now: float) -> Trace:
        """Walk the rendered rules of the packet's address family."""
        return backend.walk(rules[family_of(packet.destination)], packet, host, memory, now)

    return answer


ANSWERS = {"plan": plan_answer, "rules": rules_answer}


def testify(scenario: Scenario, mode: str, against: str, flows: tuple[ScenarioFlow, ...]) -> list[WitnessFinding]:
    """Return what the witness `against` says about the flows and all steps."""
    answer = ANSWERS[against](scenario, mode)
    finding = partial(WitnessFinding, scenario=scenario.name, mode=mode, against=against)
    findings = []
    for flow in as_declared(flows, BACKENDS[mode].deviations):
        trace = answer(packet_of(scenario, flow), host_of(scenario, flow), None, 0.0)
        ok = possible_ends(trace) == flow.expect
        findings.append(finding(label=flow.label, expect=say(flow.expect), got=say_trace(trace), ok=ok))
    for step, got, ok in _follow(scenario, mode, answer):
        findings.append(finding(label=f"step {step.number}", expect=step.pick, got=got, ok=ok))
    return findings


class _History(msgspec.Struct):
    """One possible past: affinity records, and the endpoint of each step."""

    memory: Memory
    picks: Mapping[int, tuple[str, int]] = {}


def _follow(scenario: Scenario, mode: str, answer: Answer) -> Iterator[tuple[ScenarioStep, OutcomeText, bool]]:
    """Take the steps in every possible history, up to BRANCHES; a demand must hold in all of them."""
    histories = [_History(Memory())]
    for step in scenario.steps_in(mode):
        packet, host = packet_of(scenario, step), host_of(scenario, step)
        traces = [(history, answer(packet, host, history.memory, step.at)) for history in histories]
        yield step, *_judge(step, traces)
        histories = _spread([_after(history, outcome, step) for history, t in traces for outcome in _live(t)])
        if not histories:
            break


def _judge(step: ScenarioStep, traces: list[tuple[_History, Trace]]) -> tuple[OutcomeText, bool]:
    """Return the first outcome that does not fit, or all outcomes and True."""
    picks: set[str] = set()
    for history, trace in traces:
        before = history.picks.get(step.refers_to) if step.refers_to is not None else None
        for outcome in _live(trace):
            if outcome.endpoint is None:
                return say_trace(trace), False
            if not step.allows(outcome.endpoint, before):
                was = f" when step {step.refers_to} had {join_port(*before)}" if before else ""
                return {"dnat": [join_port(*outcome.endpoint)], "history": f"possible{was}"}, False
            picks.add(join_port(*outcome.endpoint))
    return {"dnat": sorted(picks)}, True


def _live(trace: Trace) -> list[Outcome]:
    return [outcome for outcome in trace.outcomes if outcome.probability > 0]


def _after(history: _History, outcome: Outcome, step: ScenarioStep) -> _History:
    memory = copy.deepcopy(history.memory)
    for name, key in outcome.remembers:
        memory.touch(name, key, step.at)
    endpoint = outcome.endpoint if outcome.disposition is Disposition.DELIVERED and outcome.endpoint else ("", 0)
    return _History(memory, {**history.picks, step.number: endpoint})


def _spread(histories: list[_History]) -> list[_History]:
    """Return at most BRANCHES of the histories, chosen evenly."""
    if len(histories) <= BRANCHES:
        return histories
    return [histories[index * len(histories) // BRANCHES] for index in range(BRANCHES)]
