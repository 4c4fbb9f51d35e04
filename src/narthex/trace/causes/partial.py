"""Causes that copied texts show: warnings and log lines, chains that nothing calls, rules that a tool could not decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from narthex.model import Disposition, Host, IPFamily, Packet
from narthex.netfilter.ast import NOT_DECODED, Table, Unknown
from narthex.netfilter.walk.state import BEFORE_INPUT
from narthex.netfilter.walk.walk import HookPoint, HookWalk
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import DiagnosisContext, finding, node_words, rule_text
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, Stage


class _NeededChain(NamedTuple):
    """A chain that does nothing unless a built-in chain calls it."""

    table: str
    base: str
    chain: str
    maker: str
    effect: str


_NEEDED = (
    _NeededChain("nat", "PREROUTING", "KUBE-SERVICES", "kube-proxy", "no packet from outside or from a pod reaches a Service"),
    _NeededChain("nat", "POSTROUTING", "KUBE-POSTROUTING", "kube-proxy", "nothing that goes to a Service is masqueraded"),
    _NeededChain("nat", "POSTROUTING", "FLANNEL-POSTRTG", "flannel", "what pods send outside is not masqueraded"),
    _NeededChain("filter", "FORWARD", "FLANNEL-FWD", "flannel", "a FORWARD policy DROP holds for pods"),
    _NeededChain("nat", "PREROUTING", "CNI-HOSTPORT-DNAT", "the portmap plugin", "host ports are closed"),
    _NeededChain("filter", "FORWARD", "cali-FORWARD", "Calico", "network policies have no effect"),
    _NeededChain("nat", "POSTROUTING", "cali-POSTROUTING", "Calico", "what pods send outside is not masqueraded"),
)  # fmt: skip
LEGACY_WARNING = "iptables-legacy tables present"
_STAND_IN = {IPFamily.IPV4: "192.0.2.1", IPFamily.IPV6: "2001:db8::1"}
"""An address that rules don't name, for a pod that is unknown."""


def of_partial(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find what the text itself says of a fault."""
    yield from _legacy(scene)
    yield from _log(scene)
    yield from _undecoded(scene)
    yield from _not_called(scene)
    yield from _closed_forward(scene)


def of_refusals(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Name the rule that refuses the packet if nothing else explains the refusal."""
    if scene.explained:
        return
    for leaf in scene.failing:
        last = leaf.steps[-1] if leaf.steps else None
        if last is None or leaf.end.fate not in (Fate.DROPPED, Fate.REJECTED):
            continue
        if last.stage is Stage.IPVS:
            yield finding(
                "no-endpoints",
                f"IPVS of {scene.node_words} has no real server for {scene.packet.destination} port {scene.packet.port}",
                evidence=(last.what,),
                advice="See the Service's endpoints: `kubectl get endpointslices`, and the pods' readiness.",
                node=last.node,
            )
            return
        yield finding(
            "rule-drops",
            f"chain {last.chain} of table {last.table} refuses the packet in hook {last.stage.value}",
            evidence=(last.rule or last.what,),
            advice="Find out which program made the rule (usually its comment or chain shows that), and narrow it.",
            node=last.node,
        )
        return


def _legacy(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        said = next((line for line in view.said if LEGACY_WARNING in line), "")
        if said:
            yield finding(
                "two-iptables",
                f"iptables of {node_words(name)} warns that iptables-legacy has tables too; a packet has to pass both, and the "
                "input has one of them",
                evidence=(said,),
                advice="See the other: `iptables-legacy-save`. Let all programs of the node use one, and remove what is left in "
                "the other.",
                node=name,
                certain=False,
                explains=scene.undecided and not scene.explained,
            )


def _log(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        said = [line for line in view.said if LEGACY_WARNING not in line]
        if said:
            yield finding(
                "rules-not-loaded",
                f"the Service proxy of {node_words(name)} could not write its rules; those in the kernel are older than what it "
                "knows",
                evidence=tuple(said[:3]),
                advice="Repair what its log names; the line number is that of the rules that it gave to the tool. Until then no "
                "change of a Service takes effect on this node.",
                node=name,
                certain=False,
                explains=scene.undecided and not scene.explained,
            )


def _undecoded(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    rules = scene.rules()
    if rules is not None and rules.unread:
        # Lines that a terminal or a mail cut look the same.
        return
    for leaf in scene.leaves:
        if leaf.end.fate is Fate.UNKNOWN and NOT_DECODED in leaf.end.reason:
            last = scene.last_rule(leaf)
            yield finding(
                "old-iptables",
                f"the tool that printed the rules of {scene.node_words} could not decode some of them: an older version wrote them "
                "out than the one that made them, and what it left out is unknown",
                evidence=(rule_text(last) if last is not None else leaf.end.reason,),
                advice="Print them with the version that made them, as in kube-proxy's container. A program of the older version "
                "that writes the rules back destroys them.",
                node=scene.node,
                certain=False,
                explains=not scene.explained,
            )
            return


def _not_called(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    for name, view in scene.visited():
        for table in scene.tables(view):
            for needed in _NEEDED:
                if _lacks_call(table, needed):
                    yield finding(
                        "chain-not-called",
                        f"no rule of chain {needed.base} of table {table.name} on {node_words(name)} calls {needed.chain} "
                        f"({needed.maker}): {needed.effect}",
                        evidence=(f"table {table.name}: chain {needed.chain} has no reference in {needed.base}",),
                        advice=f"Start {needed.maker} anew, which writes the jump, and see what removed it: a firewall that flushes "
                        "its tables, or another iptables.",
                        node=name,
                        certain=not _is_copied(scene, view),
                        explains=scene.undecided and not scene.explained,
                    )
                    return


def _is_copied(scene: DiagnosisContext, view: NodeView) -> bool:
    """Return True for rules of a text that a person copied, which may lack the line."""
    rules = scene.rules(view)
    return rules is None or rules.assumed.copied


def _lacks_call(table: Table, needed: _NeededChain) -> bool:
    if table.name != needed.table or table.partial or not {needed.base, needed.chain} <= set(table.chains):
        return False
    if any(isinstance(each, Unknown) for rule in table.chains[needed.base].rules for each in rule.expressions):
        return False
    callers = {needed.base, *table.chains[needed.base].targets} & set(table.chains)
    return not any(needed.chain in table.chains[name].targets for name in callers)


def _closed_forward(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Without table nat: find a FORWARD policy that drops whatever the rules send to a pod."""
    rules = scene.rules()
    if rules is None or not any(
        leaf.end.fate is Fate.UNKNOWN and "table nat" in leaf.end.reason for leaf in scene.leaves
    ):
        return
    packet = Packet(
        source=scene.packet.source,
        destination=_STAND_IN[scene.family],
        port=scene.packet.port,
        protocol=scene.protocol,
        iif=scene.packet.iif or "(unknown)",
    )
    walk = HookWalk(rules.assumed, packet, Host(), objects=rules.objects)
    _, ended = walk.hook(HookPoint("forward", iif=packet.iif, oif=None), [walk.start()], span=BEFORE_INPUT)
    for branch, end in ended:
        last = branch.last_step()
        if end.disposition is Disposition.DROPPED and last is not None and last.what == "policy drop":
            yield finding(
                "forward-drop",
                f"chain {last.chain} of table {last.table} drops what {scene.node_words} should forward to a pod, unless a rule "
                "that the input lacks lets it pass: its policy is DROP",
                evidence=(f"{last.table} {last.chain}: policy drop", *branch.supposing[:3]),
                advice="Let the pods' networks pass (`iptables -I FORWARD -d POD-CIDR -j ACCEPT`, and the same with -s), or set "
                "the policy to ACCEPT. Docker sets it to DROP when it starts.",
                node=scene.node,
                certain=False,
            )
            return
