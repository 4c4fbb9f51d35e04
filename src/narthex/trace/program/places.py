"""Senders and destinations as users name them, and the packet from one to the other.

A user names addresses, pods, nodes, Services, or DNS names; `question` makes the packet of two of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from narthex.model import (
    Host,
    InputError,
    NamespacedName,
    Packet,
    Protocol,
    Service,
    Snapshot,
    address,
    contains,
    family_of,
)
from narthex.proxy.plan.planner import pod_detector
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.scene import finding
from narthex.trace.model import NameLookup
from narthex.trace.names import AddressName

if TYPE_CHECKING:
    from narthex.dns.search_list import CandidateLookup, NameResolution
    from narthex.trace.program.inputs import NodeInputs

OUTSIDE = ("198.51.100.7", "2001:db8:c::7")
"""Default addresses of a client outside the cluster, from those reserved for documentation."""
OUTSIDE_NAMES = {ip: AddressName("outside", "") for ip in OUTSIDE}

CLUSTER_DOMAIN = "cluster.local"
"""The default cluster domain."""
_DEFAULT_BRIDGE = "cni0"
_PROTOCOLS = {protocol.lower: protocol for protocol in Protocol}


class TraceError(InputError):
    """The request can't be traced; the message says what would help."""


class AddressOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Something with addresses that a user may name as sender or destination."""

    kind: str
    """`address`, `pod`, `Service`, `node` or `outside`."""
    name: str
    addresses: tuple[str, ...]
    node: str = ""
    service: Service | None = None
    lookup: tuple[NameLookup, ...] = ()
    """The DNS questions that led to the addresses, if a name was given."""


class DestinationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of `DST[:PORT][/PROTO]`."""

    name: str
    port: str = ""
    protocol: Protocol | None = None


def split_destination(text: str) -> DestinationSpec:
    """Parse `DST[:PORT][/PROTO]`. Raises TraceError.

    `a/tcp` without a port is an object of namespace `a`, unless `a` is an address or contains a slash.
    """
    name, slash, last = text.rpartition("/")
    protocol = _PROTOCOLS.get(last.lower()) if slash else None
    if protocol is not None:
        rest, port = _split_port(name)
        if port or "/" in name or as_address(rest) is not None:
            return DestinationSpec(name=rest, port=port, protocol=protocol)
    rest, port = _split_port(text)
    return DestinationSpec(name=rest, port=port)


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        inside, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise TraceError(f"{text!r} is not [ADDRESS]:PORT")
        return inside, rest[1:]
    if text.count(":") == 1:
        name, _, port = text.partition(":")
        return name, port
    return text, ""


def as_address(text: str) -> str | None:
    """Return the address in canonical form; None if it isn't one."""
    try:
        return address(text)
    except ValueError:
        return None


class OwnerIndex:
    """Finds what a user names."""

    def __init__(self, snapshot: Snapshot, outside: Sequence[str] = OUTSIDE, pods: Iterable[AddressOwner] = ()) -> None:
        """Index the objects; `outside` are addresses of a client outside, `pods` are pods without an object."""
        self.snapshot = snapshot
        self._services = snapshot.services
        self._places: list[AddressOwner] = [AddressOwner(kind="outside", name="outside", addresses=tuple(outside))]
        for node in snapshot.nodes.values():
            ips = (*node.internal_ips, *node.external_ips)
            self._places.append(AddressOwner(kind="node", name=node.name, addresses=ips, node=node.name))
        known: dict[str, AddressOwner] = {place.name: place for place in pods}
        for pod in snapshot.pods.values():
            known.setdefault(
                str(pod.key), AddressOwner(kind="pod", name=str(pod.key), addresses=pod.ips, node=pod.spec.node_name)
            )
        for name, place in _targets(snapshot).items():
            known.setdefault(name, place)
        self._places += [known[name] for name in sorted(known)]

    def sender(self, text: str) -> AddressOwner:
        """Return an address, a pod, a node or `outside`. Raises TraceError."""
        found = [place for place in self._places if _is(place, text)]
        if not found and as_address(text) is None and _split_port(text)[1]:
            raise TraceError(
                f"{text!r} has a port: a sender is a pod, a node, an address, or `outside`; --sport names its port"
            )
        return self._literal(text) or self._one(text, found)

    def destination(self, text: str) -> AddressOwner:
        """Return a sender or a Service; a Service wins over a pod of the same name. Raises TraceError."""
        services = []
        for key, service in sorted(self._services.items()):
            ips = tuple(ip for ip in service.cluster_ips if ip != "None")
            services.append(AddressOwner(kind="Service", name=str(key), addresses=ips, service=service))
        found = [place for place in services if _is(place, text)] or [each for each in self._places if _is(each, text)]
        return self._literal(text) or self._one(text, found, services)

    def _literal(self, text: str) -> AddressOwner | None:
        literal = as_address(text)
        if literal is None:
            return None
        place = self.at(literal)
        return AddressOwner(kind="address", name=literal, addresses=(literal,), node=place.node if place else "")

    def knows(self, text: str) -> bool:
        """Return True if something has exactly this name."""
        return any(_is(place, text) for place in self._places)

    def at(self, ip: str) -> AddressOwner | None:
        """Return the pod, node, or other owner of an address."""
        return next((place for place in self._places if ip in place.addresses), None)

    def of(self, ip: str) -> Service | None:
        """Return the Service that owns an address."""
        for _, found in sorted(self._services.items()):
            if ip in (*found.cluster_ips, *found.external_ips, *(entry.ip for entry in found.ingress)):
                return found
        return None

    def _one(self, text: str, found: list[AddressOwner], more: Sequence[AddressOwner] = ()) -> AddressOwner:
        # "web" alone means the one in the namespace `default`, as with kubectl, unless only another one exists.
        default = [place for place in found if place.name == f"default/{text}"]
        found = default or found
        if len(found) > 1:
            raise TraceError(f"{text!r} could be {', '.join(place.name for place in found)}: name it in full")
        if not found:
            known = [place.name for place in (*self._places, *more)]
            near = difflib.get_close_matches(text, known, n=3, cutoff=0.5) or known[:6]
            hint = (
                ""
                if self._services or self.snapshot.pods
                else "; names of pods and Services need objects: --kubeconfig or --manifests"
            )
            raise TraceError(f"there is no {text!r}; there are {', '.join(near)}, or give an address{hint}")
        if not found[0].addresses:
            raise TraceError(f"{found[0].kind} {found[0].name} has no address")
        return found[0]


def _is(place: AddressOwner, text: str) -> bool:
    kind, _, rest = text.partition("/")
    expected = {"svc": "service"}.get(kind, kind)
    if rest and expected in ("pod", "service", "node") and expected == place.kind.lower():
        text = rest
    return place.name == text or ("/" in place.name and place.name.split("/", 1)[1] == text)


def _targets(snapshot: Snapshot) -> dict[str, AddressOwner]:
    """Return pods that only EndpointSlices name."""
    found: dict[str, AddressOwner] = {}
    for slices in snapshot.slices.values():
        for each in slices.values():
            for endpoint in each.endpoints:
                if endpoint.target:
                    name = str(NamespacedName(each.namespace, endpoint.target))
                    before = found[name].addresses if name in found else ()
                    ips = tuple(dict.fromkeys((*before, endpoint.address)))
                    found[name] = AddressOwner(kind="pod", name=name, addresses=ips, node=endpoint.node_name)
    return found


def by_name(places: OwnerIndex, source: AddressOwner, name: str, domain: str) -> AddressOwner:
    """Resolve a name as a pod's resolver and the cluster's DNS do. Raises TraceError with all questions if there is no address."""
    from narthex.dns.search_list import look_up, pod_search

    pod = source if source.kind == "pod" else places.at(source.addresses[0])
    if pod is None or pod.kind != "pod":
        raise TraceError(
            f"{name!r} is a name for the cluster's DNS, which pods ask, and {source.name} is no pod that is known; "
            "name a Service as NAMESPACE/NAME, or give an address"
        )
    namespace = pod.name.partition("/")[0]
    try:
        resolution = look_up(name, pod_search(namespace, domain), places.snapshot, domain)
    except ValueError as error:
        raise TraceError(f"the name {name!r} or the domain {domain!r} {error}") from error
    lookup = tuple(NameLookup(question=each.name, answer=_answer(each)) for each in resolution.asked)
    if not resolution.addresses:
        questions = [f"{each.question}: {each.answer}" for each in lookup]
        services = map(str, sorted(places.snapshot.services))
        found = name_not_found(name, f"pod {pod.name}", questions, services, _advice(resolution))
        asked = "".join(f"\n  {question}" for question in questions)
        raise TraceError(f"{found.sentence}; it asks for{asked}\n{found.advice}\nMore in {found.cause.page}.")
    if resolution.musl_stops:
        lookup += (
            NameLookup(
                question="note",
                answer=f"a resolver of musl (Alpine) stops at {resolution.musl_stops}, which exists but is empty",
            ),
        )
    service = places.of(resolution.addresses[0])
    first = places.at(resolution.addresses[0])
    return AddressOwner(
        kind="Service" if service else first.kind if first else "address",
        name=name,
        addresses=resolution.addresses,
        node=first.node if first and not service else "",
        service=service,
        lookup=lookup,
    )


def _answer(asked: CandidateLookup) -> str:
    if asked.alias:
        return f"an alias of {asked.alias}, which is not the cluster's"
    return ", ".join(asked.addresses) or {
        "nothing": "exists, without an address",
        "elsewhere": "not the cluster's; the servers behind its DNS are asked",
    }.get(asked.answer, asked.answer)


def _advice(resolution: NameResolution) -> str:
    last = resolution.asked[-1]
    if last.alias:
        return f"Trace to the address that {last.alias} has."
    if any(each.answer == "nothing" for each in resolution.asked):
        return "A name that exists has no address: a namespace alone, or a Service of another IP family."
    return (
        "No Service goes by this name, or it is headless and nothing is ready. A Service is NAME, NAME.NAMESPACE or "
        "NAME.NAMESPACE.svc."
    )


def name_not_found(name: str, asker: str, asked: Iterable[str], services: Iterable[str], advice: str) -> CauseFinding:
    """Return the finding for a name without an address.

    `asker` is the pod, `asked` are its questions with their answers, `services` are `NAMESPACE/NAME`.
    """
    labels = name.rstrip(".").split(".")
    known = {f"{service}.{namespace}": f"{namespace}/{service}"
             for namespace, _, service in (each.partition("/") for each in services)}  # fmt: skip
    namespace = asker.removeprefix("pod ").partition("/")[0]
    full = ".".join(labels[:2]) if len(labels) > 1 else f"{labels[0]}.{namespace}"
    near = difflib.get_close_matches(full, known, n=3, cutoff=0.75)
    near += [each for each in known if each.partition(".")[0] == labels[0] and each not in near][:3]
    if near:
        advice += f" Names that are close: {', '.join(near)}."
    return finding("dns-name", f"{asker} finds no address for {name!r}", evidence=tuple(asked), advice=advice)


class ResolvedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The packet to trace, and its two ends."""

    packet: Packet
    source: AddressOwner
    destination: AddressOwner


def ask(
    places: OwnerIndex, sender: str, destination: str, domain: str = CLUSTER_DOMAIN
) -> tuple[AddressOwner, AddressOwner, DestinationSpec]:
    """Find both ends; `domain` is the cluster domain. Raises TraceError."""
    spec = split_destination(destination)
    source = places.sender(sender)
    if "." in spec.name and as_address(spec.name) is None and not places.knows(spec.name):
        return source, by_name(places, source, spec.name, domain), spec
    return source, places.destination(spec.name), spec


def question(
    places: OwnerIndex,
    source: AddressOwner,
    target: AddressOwner,
    spec: DestinationSpec,
    inputs: NodeInputs,
    host: Host,
    iif: str | None,
) -> ResolvedRequest:
    """Return the packet to trace. `iif` None stands for an interface that fits the sender. Raises TraceError."""
    sent_from, to, port, protocol = flow_of(places, source, target, spec)
    family = family_of(to)
    own = sent_from in host.addresses or contains(family.loopback, sent_from)
    arrives = "" if own else _arrival(inputs, source, sent_from) if iif is None else iif
    packet = Packet(source=sent_from, destination=to, port=port, protocol=protocol, iif=arrives, from_host=own)
    return ResolvedRequest(packet=packet, source=source, destination=target)


def flow_of(
    places: OwnerIndex, source: AddressOwner, target: AddressOwner, spec: DestinationSpec
) -> tuple[str, str, int, Protocol]:
    """Return source, destination, port, and protocol, in the first IP family that both ends have. Raises TraceError."""
    to = next((ip for ip in target.addresses if any(family_of(own) is family_of(ip) for own in source.addresses)), None)
    if to is None:
        raise TraceError(f"{source.name} and {target.name} have no IP family in common")
    port, protocol = port_of(places, target, to, spec)
    return next(ip for ip in source.addresses if family_of(ip) is family_of(to)), to, port, protocol


def port_of(places: OwnerIndex, target: AddressOwner, to: str, spec: DestinationSpec) -> tuple[int, Protocol]:
    """Return port and protocol: those given, or those of the Service's port by name or its only one. Raises TraceError."""
    if spec.protocol is Protocol.ICMP:
        return 0, Protocol.ICMP
    service = target.service or places.of(to)
    ports = [each for each in (service.ports if service else ()) if spec.protocol in (None, each.protocol)]
    if spec.port.isascii() and spec.port.isdigit():
        number = int(spec.port)
        if not 0 < number < 65536:
            raise TraceError(f"{number} is not a port (1-65535)")
        same = [each.protocol for each in ports if each.port == number]
        return number, spec.protocol or (Protocol.TCP if Protocol.TCP in same or not same else same[0])
    fitting = [each for each in ports if not spec.port or each.name == spec.port]
    if len(fitting) == 1:
        return fitting[0].port, fitting[0].protocol
    choices = ", ".join(
        f"{each.port}/{each.protocol.lower}" + (f" ({each.name})" if each.name else "") for each in ports
    )
    if spec.port:
        raise TraceError(f"{spec.port!r} is no port of {target.name}" + (f"; there are {choices}" if choices else ""))
    raise TraceError(
        f"which port of {target.name}? " + (f"There are {choices}" if choices else "Write it as NAME:PORT")
    )


def _arrival(inputs: NodeInputs, source: AddressOwner, sent_from: str) -> str:
    """Return the input interface for this sender, as pod detection expects it."""
    config, node = inputs.config, inputs.node
    here = any(contains(cidr, sent_from) for cidr in node.pod_cidrs)
    if not here and (source.kind != "pod" or source.node != config.node_name):
        return "eth0"
    detector = pod_detector(config, family_of(sent_from), node)
    return detector.pod_interface or config.bridge_interface or _DEFAULT_BRIDGE
