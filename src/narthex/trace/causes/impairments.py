"""Causes beyond the nodes' configuration: faults of a lab, dead nodes and processes, nodes that are not ready."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from narthex.model import Pod, Service
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import DiagnosisContext, ServiceEndpoint, finding
from narthex.trace.follow.views import Impairment
from narthex.trace.model import Fate, PathLeaf, PathStep, Stage, branch_steps

_STALE = frozenset({"stale-rules", "stale-endpoint", "no-proxy", "node-port-address", "conntrack-stale"})
"""Causes that a proxy leads to that does not follow the cluster."""
_LINKS = frozenset({"link-down", "neighbour-missing", "fdb-missing"})
_WITHOUT_ENDPOINTS = frozenset(
    {"endpoints-not-ready", "endpoints-missing", "no-endpoints", "local-policy", "selector-matches-nothing"}
)
"""Causes that endpoints lead to that do not work."""
_MOST_ENDPOINTS = 3


def of_impairments(scene: DiagnosisContext, explained_by: Collection[str]) -> Iterator[CauseFinding]:
    """Find what is broken behind a failure; `explained_by` are the ids of the causes that were found in the path itself."""
    seen: set[str] = set()
    for impairment, sentence, evidence in (
        *_lost(scene),
        *_behind_links(scene, explained_by),
        *_behind_endpoints(scene, explained_by),
        *_unserved(scene, explained_by),
        *_behind_rules(scene, explained_by),
    ):
        if impairment.text not in seen:
            seen.add(impairment.text)
            yield _finding(impairment, sentence, evidence)
    if _WITHOUT_ENDPOINTS & set(explained_by):
        yield from _nodes_not_ready(scene, seen)
    for impairment in _touched(scene):
        if impairment.text not in seen:
            seen.add(impairment.text)
            yield _finding(impairment, impairment.text, (), explains=False)


def _finding(
    impairment: Impairment, sentence: str, evidence: tuple[str, ...], *, explains: bool = True
) -> CauseFinding:
    nodes = sorted(place for place in impairment.places if "/" not in place)
    return finding(
        impairment.cause,
        sentence,
        evidence=evidence,
        advice=impairment.advice,
        node=nodes[0] if len(nodes) == 1 else "",
        explains=explains,
    )


Reason = tuple[Impairment, str, tuple[str, ...]]
"""An impairment, what it does to the packet, and what shows it."""


def _lost(scene: DiagnosisContext) -> Iterator[Reason]:
    """Yield the impairments that lose the packet or its reply."""
    for leaf in sorted(scene.leaves, key=lambda leaf: leaf.end.fate is Fate.DELIVERED):
        for step in _fault_steps(leaf):
            impairment = next((each for each in scene.impairments if each.text == step.what), None)
            if impairment is not None:
                what = "the reply" if leaf.end.fate is Fate.DELIVERED else "the packet"
                share = "" if step.probability == 1 else f" with a probability of {float(step.probability) * 100:.3g} %"
                yield impairment, f"{impairment.text}: {what} is lost{share}", ()


def _fault_steps(leaf: PathLeaf) -> Iterator[PathStep]:
    steps: Iterable[PathStep] = leaf.steps
    if leaf.end.reply is not None:
        steps = (*steps, *branch_steps(leaf.end.reply))
    yield from (step for step in steps if step.stage is Stage.FAULT)


def _behind_links(scene: DiagnosisContext, explained_by: Collection[str]) -> Iterator[Reason]:
    """Yield what takes a link down, or keeps a neighbour from responding."""
    if not _LINKS & set(explained_by):
        return
    nodes = {leaf.end.node for leaf in (*scene.failing, *scene.unanswered)}
    for impairment in scene.impairments:
        if impairment.lost == 1 and nodes & impairment.places:
            yield impairment, f"{impairment.text}: nothing leaves it or reaches it", ()


def _behind_endpoints(scene: DiagnosisContext, explained_by: Collection[str]) -> Iterator[Reason]:
    """Yield what keeps the Service's endpoints from being ready."""
    front = scene.front
    if front is None or not _WITHOUT_ENDPOINTS & set(explained_by):
        return
    hurt = [
        (_places(each), each.endpoint.target or each.endpoint.address, f"EndpointSlice {each.where}: {each.endpoint.address} on "
         f"{each.endpoint.node_name or '?'} is not ready")
        for each in scene.endpoints
        if each not in scene.usable
    ] + [
        ({str(pod.key), pod.spec.node_name}, pod.name, f"pod {pod.key} on {pod.spec.node_name or '?'} is no endpoint")
        for pod in (scene.cluster.pods.values() if scene.cluster is not None else ())
        if not scene.endpoints and pod.namespace == front.service.namespace and _selects(front.service, pod)
    ]  # fmt: skip
    for impairment in scene.impairments:
        hit = [each for each in hurt if impairment.places & each[0]][:_MOST_ENDPOINTS]
        if hit and (impairment.lost or impairment.unserved):
            names = ", ".join(name for _, name, _ in hit)
            evidence = tuple(shown for _, _, shown in hit)
            yield impairment, f"{impairment.text}: so {front.name} has lost the endpoints {names}", evidence


def _selects(service: Service, pod: Pod) -> bool:
    return bool(service.selector) and set(service.selector) <= set(pod.labels)


def _places(each: ServiceEndpoint) -> set[str]:
    return {each.endpoint.node_name or "", f"{each.where_namespace}/{each.endpoint.target}"}


def _unserved(scene: DiagnosisContext, explained_by: Collection[str]) -> Iterator[Reason]:
    """Yield why nothing listens where the packet arrives."""
    if "not-listening" not in explained_by:
        return
    for leaf in scene.leaves:
        address = leaf.end.address
        views = [*scene.views.values(), *(pod for view in scene.views.values() for pod in view.pods.values())]
        held = [view.name for view in views if view.own(address) is not None]
        for impairment in scene.impairments:
            if impairment.unserved and impairment.places & set(held):
                yield impairment, f"{impairment.text}: nothing accepts the packet there", ()


def _behind_rules(scene: DiagnosisContext, explained_by: Collection[str]) -> Iterator[Reason]:
    """Yield why the rules of a node do not follow the cluster."""
    if not _STALE & set(explained_by):
        return
    nodes = {scene.node, *(name for name, _ in scene.visited())}
    for impairment in scene.impairments:
        if impairment.stale and nodes & impairment.places:
            yield impairment, f"{impairment.text}: the rules of {scene.node_words} do not follow the cluster", ()


def _nodes_not_ready(scene: DiagnosisContext, seen: Collection[str]) -> Iterator[CauseFinding]:
    """Find nodes that are not ready, on which the endpoints of the Service are."""
    front, cluster = scene.front, scene.cluster
    if front is None or cluster is None or seen:
        return
    names = {each.endpoint.node_name for each in scene.endpoints if each not in scene.usable}
    for node in sorted(cluster.nodes.values(), key=lambda node: node.name):
        if node.name in names and not node.ready:
            yield finding(
                "node-not-ready",
                f"node {node.name} is not ready, and so are the endpoints of {front.name} on it",
                evidence=(f"Node {node.name}: condition Ready is not True",),
                advice=f"See `kubectl describe node {node.name}`, its kubelet, and whether it reaches the API server.",
                node=node.name,
            )


def _touched(scene: DiagnosisContext) -> Iterator[Impairment]:
    """Yield impairments of places on the path that do not make it fail."""
    places = {step.node for leaf in scene.leaves for step in leaf.steps}
    places |= {step.namespace for leaf in scene.leaves for step in leaf.steps}
    named = [scene.path.source.name, *(leaf.end.name for leaf in scene.leaves)]
    places |= {word for name in named for word in name.split()}
    yield from (each for each in scene.impairments if each.places & places)
