"""Address pools and their advertisements: MetalLB's custom resources, or a file of kind LoadBalancerConfiguration.

    apiVersion: narthex/v1alpha1
    kind: LoadBalancerConfiguration
    pools:
    - name: first
      addresses: [192.168.15.0/28, 192.168.15.100-192.168.15.110]
    advertisements:
    - name: on-the-lan
      ipAddressPools: [first]
      interfaces: [eth0]

An entry has the `spec` fields of the custom resource, and `name` and `labels`. Both forms are decoded by the same decoder
into the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from narthex.model import (
    IPAddressPool,
    L2Advertisement,
    Labels,
    NamespacedName,
    Problem,
    ProblemCollector,
    ProblemList,
    Selector,
    Service,
    kind_of,
    quoted,
    steps,
)
from narthex.model.decode.objects import MAX_BYTES, decode
from narthex.model.documents import Document, MalformedDocument, read_documents
from narthex.model.selector import matches
from narthex.model.wire import WireIPAddressPoolSpec, WireL2AdvertisementSpec

__all__ = ["API_VERSION", "KIND", "IPAddressPool", "L2Advertisement", "LoadBalancerConfiguration", "read"]

API_VERSION, KIND = "narthex/v1alpha1", "LoadBalancerConfiguration"
_GROUP = "metallb.io/v1beta1"
_SPECS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("pools", "IPAddressPool", WireIPAddressPoolSpec),
    ("advertisements", "L2Advertisement", WireL2AdvertisementSpec),
)
"""Section, kind of its entries, and their wire type."""


class LoadBalancerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a configuration file."""

    pools: tuple[IPAddressPool, ...] = ()
    advertisements: tuple[L2Advertisement, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def failed(self) -> bool:
        """True if there are errors. Then none of the file is used, and the previous configuration stays in force."""
        return any(problem.severity == "error" for problem in self.problems)


def read(data: bytes, origin: str) -> LoadBalancerConfiguration:
    """Read pools and advertisements from a file with documents of our kind, MetalLB's kinds, or both. Never raises.

    `origin` is the file name; problems get `origin:line`.
    """
    if len(data) > MAX_BYTES:
        return _failed(origin, f"holds {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _failed(origin, f"is not UTF-8 text (at byte {error.start})")
    objects: list[Any] = []
    problems = ProblemList(origin=origin)
    for document in read_documents(text):
        if isinstance(document, MalformedDocument):
            problems.append(Problem(origin=f"{origin}:{document.line}", message=document.message))
            continue
        for found in _unfold(document, origin, problems):
            problems.extend(found.problems)
            objects += [found.object] if found.object is not None else []
    pools = tuple(each for each in objects if isinstance(each, IPAddressPool))
    advertisements = tuple(each for each in objects if isinstance(each, L2Advertisement))
    if not objects and not problems.problems:
        problems.append(Problem(origin=origin, message=f"holds no document of kind {KIND} ({API_VERSION})"))
    problems.extend(_doubled((*pools, *advertisements)))
    return LoadBalancerConfiguration(pools=pools, advertisements=advertisements, problems=problems.problems)


def selects_pool(advertisement: L2Advertisement, pool: IPAddressPool) -> bool:
    """Return True if the advertisement covers the pool; without names and selectors it covers all pools."""
    if not advertisement.pools and not advertisement.pool_selectors:
        return True
    return pool.name in advertisement.pools or _any(advertisement.pool_selectors, pool.labels)


def selects_node(advertisement: L2Advertisement, labels: Labels) -> bool:
    """Return True if a node with these labels may announce for the advertisement."""
    return not advertisement.node_selectors or _any(advertisement.node_selectors, labels)


def selects_service(advertisement: L2Advertisement, service: Service) -> bool:
    """Return True if the advertisement covers the Service."""
    return not advertisement.service_selectors or _any(advertisement.service_selectors, service.labels)


def pool_serves(pool: IPAddressPool, service: Service, namespace_labels: Labels) -> bool:
    """Return True if a Service may use the pool. `namespace_labels` are the labels of its namespace."""
    allocation = pool.allocation
    if allocation is None:
        return True
    somewhere = not allocation.namespaces and not allocation.namespace_selectors
    somewhere = (
        somewhere
        or service.namespace in allocation.namespaces
        or _any(allocation.namespace_selectors, namespace_labels)
    )
    return somewhere and (not allocation.service_selectors or _any(allocation.service_selectors, service.labels))


def _any(selectors: Iterable[Selector], labels: Labels) -> bool:
    held = dict(labels)
    return any(matches(held, selector) for selector in selectors)


def _failed(origin: str, message: str) -> LoadBalancerConfiguration:
    return LoadBalancerConfiguration(problems=(Problem(origin=origin, object=KIND, message=message),))


def _unfold(document: Document, origin: str, problems: ProblemList) -> Iterator[Any]:
    raw = document.value

    def locate(path: tuple[str | int, ...]) -> str:
        """Return the file and line of a field, for messages."""
        return f"{origin}:{document.line_of(raw, path, document.line)}"

    if not isinstance(raw, dict):
        problems.append(Problem(origin=locate(()), object=KIND, message=f"is {kind_of(raw)}, must be a mapping"))
        return
    if raw.get("kind") != KIND:
        yield decode(raw, locate(()), lambda field: locate(steps(field)))
        return
    report = ProblemCollector(locate(()), KIND, lambda field: locate(steps(field)))
    if raw.get("apiVersion") != API_VERSION:
        report.error("apiVersion", f"{quoted(raw.get('apiVersion'))} is not {API_VERSION}")
    _unknown(raw, ("apiVersion", "kind", *(section for section, _, _ in _SPECS)), "", report)
    for section, kind, spec in _SPECS:
        entries = raw.get(section) or []
        if not isinstance(entries, list):
            report.error(section, f"is {kind_of(entries)}, must be a list")
            continue
        for index, entry in enumerate(entries):
            field = f"{section}[{index}]"
            if not isinstance(entry, dict):
                report.error(field, f"is {kind_of(entry)}, must be a mapping with a name")
                continue
            _unknown(entry, ("name", "labels", *(each.name for each in msgspec.structs.fields(spec))), field, report)
            at = (section, index)

            def inside(path: str, at: tuple[str | int, ...] = at) -> str:
                # The fields of metadata and spec are directly in the entry.
                """Return the `file:line` of a field of the entry."""
                return locate((*at, *steps(path)[1:]))

            yield decode(_resource(kind, entry), locate(at), inside)
    problems.extend(report.problems)


def _resource(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    meta = {name: entry[name] for name in ("name", "labels") if name in entry}
    spec = {name: value for name, value in entry.items() if name not in meta}
    return {"apiVersion": _GROUP, "kind": kind, "metadata": meta, "spec": spec}


def _unknown(raw: dict[Any, Any], known: tuple[str, ...], path: str, report: ProblemCollector) -> None:
    for name in raw:
        if name not in known:
            report.warning(path, f"{quoted(name)} is not a known field, ignored")


def _doubled(objects: tuple[IPAddressPool | L2Advertisement, ...]) -> Iterator[Problem]:
    first: dict[tuple[str, NamespacedName], str] = {}
    for each in objects:
        kind = type(each).__name__
        before = first.setdefault((kind, each.key), each.origin)
        if before != each.origin:
            said = f"is there twice, first at {before}"
            yield Problem(origin=each.origin, object=f"{kind} {each.key}", message=said)
