"""Causes in rules of other programs that drop or reject the packet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from narthex.model import Disposition, Host, Packet, family_of
from narthex.netfilter.walk.walk import walk
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.proxies import PROXY_TABLES, XTABLES, is_proxys
from narthex.trace.causes.scene import BALANCER, DiagnosisContext, finding, of_reply, rule_text, step_words
from narthex.trace.model import Fate, PathLeaf, PathStep, Stage

POLICY_CHAINS = {
    "cali-": "Calico",
    "KUBE-NWPLCY-": "kube-router",
    "KUBE-POD-FW-": "kube-router",
    "KUBE-ROUTER-": "kube-router",
    "WEAVE-NPC": "Weave Net",
    "CILIUM_": "Cilium",
    "ANTREA-": "Antrea",
    "KUBE-NETWORK-POLICIES": "kube-network-policies",
}
POLICY_TABLES = {
    "kube-network-policies": "kube-network-policies",
    "kindnet-network-policies": "kindnet",
    "calico": "Calico",
    "cilium": "Cilium",
}
_MAKERS = {
    "firewalld": "firewalld",
    "f2b-table": "fail2ban",
    "crowdsec": "CrowdSec",
    "docker-bridges": "Docker",
    "libvirt_network": "libvirt",
}
_CHAIN_MAKERS = {"ufw-": "UFW", "DOCKER": "Docker", "LIBVIRT_": "libvirt", "f2b-": "fail2ban", "IN_public": "firewalld"}


def of_drops(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find which other program drops the packet."""
    yield from _health_check(scene)
    found = next((each for each in map(_by_rule, scene.failing) if each is not None), None)
    if found is not None:
        yield found
        return
    lost = next((each for each in map(_by_rule, scene.lost_replies) if each is not None), None)
    if lost is not None:
        yield of_reply(lost)


def _by_rule(leaf: PathLeaf) -> CauseFinding | None:
    """Return which rule of another program drops the packet, or the reply, whose path this is."""
    # IPVS refuses by itself; that is no rule's doing.
    step = leaf.steps[-1] if leaf.steps else None
    if (
        leaf.end.fate not in (Fate.DROPPED, Fate.REJECTED)
        or step is None
        or not step.chain
        or step.table in PROXY_TABLES
    ):
        return None
    maker = _policy_maker(leaf, step)
    if maker:
        return _network_policy(step, maker)
    if is_proxys(step.table, step.chain) and not step.chain.startswith("KUBE-FIREWALL"):
        return None
    return _foreign(step) if step.table not in XTABLES else _by_stage(step)


def _health_check(scene: DiagnosisContext) -> Iterator[CauseFinding]:
    """Find rules that block the health check node port: the load balancer then sends nothing to the node."""
    front, view = scene.front, scene.view
    rules = scene.rules() if view is not None else None
    if front is None or front.kind != BALANCER or not front.local or view is None or rules is None:
        return
    port = front.service.health_check_node_port
    own = tuple(each.address for each in view.addresses or () if each.scope == "global")
    known = scene.cluster.nodes.values() if scene.cluster is not None else ()
    asked = [
        ip for node in known if node.name == scene.node for ip in node.internal_ips if family_of(ip) is scene.family
    ]
    if not port or not asked or not any(each.endpoint.node_name == scene.node for each in scene.usable):
        return
    packet = Packet(source=scene.packet.source, destination=asked[0], port=port, iif=scene.packet.iif)
    for outcome in walk(rules.assumed, packet, Host(addresses=own), objects=rules.objects).outcomes:
        if outcome.disposition not in (Disposition.DROPPED, Disposition.REJECTED):
            continue
        last = outcome.steps[-1] if outcome.steps else None
        yield finding(
            "health-check",
            f"a rule of {scene.node_words} {outcome.disposition.value} the health checks for {front.name} (port {port}), so that a "
            "load balancer treats the node as one without endpoints",
            evidence=(f"{last.where}: {last.what}",) if last else (),
            advice=f"Allow tcp/{port} from the load balancer to the nodes.",
            node=scene.node,
            explains=not scene.failing,
        )
        return


def _maker(makers: Mapping[str, str], chain: str) -> str:
    return next((name for prefix, name in makers.items() if chain.startswith(prefix)), "")


def _policy_maker(leaf: PathLeaf, step: PathStep) -> str:
    """Return the implementation of NetworkPolicy that the dropping chain, or a chain that called it, belongs to."""
    if step.table in POLICY_TABLES:
        return POLICY_TABLES[step.table]
    chains = [each.chain for each in leaf.steps if each.stage is step.stage and each.table == step.table]
    return next(filter(None, (_maker(POLICY_CHAINS, chain) for chain in (step.chain, *reversed(chains)))), "")


def _dropped_by(step: PathStep, cause: str, sentence: str, advice: str) -> CauseFinding:
    return finding(cause, sentence, evidence=(rule_text(step),), advice=advice, node=step.node)


def _network_policy(step: PathStep, maker: str) -> CauseFinding:
    return _dropped_by(
        step,
        "network-policy",
        f"a network policy ({maker}) drops it in chain {step.chain}",
        "See `kubectl get networkpolicy -A`: a pod that some policy selects gets only what a policy allows. Note that "
        "policies see the endpoint's address and port, not the Service's.",
    )


def _of_namespace(step: PathStep) -> str:
    """Return whose rule it is if it is not a node's."""
    return f" of {step_words(step)}" if step.namespace else ""


def _foreign(step: PathStep) -> CauseFinding:
    maker = _MAKERS.get(step.table, "")
    who = f" ({maker})" if maker else ""
    return _dropped_by(
        step,
        "foreign-table",
        f"table {step.family} {step.table}{who}{_of_namespace(step)} drops it in chain {step.chain}, hook {step.stage.value}",
        "In nftables an accept in one table does not overrule a drop in another. Let that table's owner allow the "
        "pods' and the Services' networks.",
    )


def _by_stage(step: PathStep) -> CauseFinding:
    maker = _maker(_CHAIN_MAKERS, step.chain)
    chain = f"{step.chain} ({maker})" if maker else step.chain
    policy = "policy" in step.what.lower() or "policy" in step.rule.lower() or not step.rule
    what = "its policy is DROP and no rule lets the packet pass" if policy else "a rule of it takes the packet"
    if step.stage is Stage.FORWARD:
        sentence = f"chain {chain} of table {step.table} drops what {step_words(step)} should forward: {what}"
        advice = (
            "Let the pods' networks pass (`iptables -I FORWARD -s POD-CIDR -j ACCEPT`, and the same with -d), or set the "
            "policy to ACCEPT. Docker sets it to DROP when it starts."
        )
        return _dropped_by(step, "forward-drop", sentence, advice)
    if step.stage is Stage.INPUT:
        sentence = f"the firewall of {step_words(step)} drops it in chain {chain}: {what}"
        port = f"{step.before.port}/{step.before.protocol}" if step.before is not None else "it"
        return _dropped_by(step, "input-drop", sentence, f"Allow {port} from the sender's network in that firewall.")
    sentence = f"chain {chain} of table {step.table}{_of_namespace(step)} drops it in hook {step.stage.value}: {what}"
    return _dropped_by(
        step,
        "rule-drops",
        sentence,
        "Find out which program made the rule (usually its comment or chain shows that), and narrow it.",
    )
