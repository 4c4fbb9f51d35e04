"""One packet's way, by plan and by rules: from what a person typed to an Explanation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from narthex.apps.inputs import Inputs
from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, Protocol, address, contains, family_of
from narthex.model.objects import Service
from narthex.model.packet import Host, Packet
from narthex.netfilter.dump import Dump
from narthex.netfilter.walk import walk
from narthex.state.store import Snapshot
from narthex.trace.evaluate import evaluate
from narthex.trace.explain import Case, Explanation, Met, explain
from narthex.trace.names import Named, Names

OUTSIDE = ("198.51.100.7", "2001:db8:c::7")
"""Addresses of a client beyond the cluster when nobody says another: those reserved for documentation."""

CLUSTER_DOMAIN = "cluster.local"
"""What a cluster's names end in when nobody says otherwise."""

_PROTOCOLS = {protocol.lower: protocol for protocol in Protocol}
_DEFAULT_BRIDGE = "cni0"


class TraceError(ValueError):
    """The question cannot be asked so; the message says what would help."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has addresses: what a person may name as sender or destination."""

    kind: str
    """address, pod, Service, node or outside."""
    name: str
    addresses: tuple[str, ...]
    node: str = ""
    """The node that it is on."""
    service: Service | None = None
    lookup: tuple[Met, ...] = ()
    """How the addresses were found, where a name was given."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, resolved."""

    packet: Packet
    source: Place
    destination: Place


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """`DST[:PORT][/PROTO]`, taken apart."""

    name: str
    port: str = ""
    protocol: Protocol | None = None


def split_destination(text: str) -> Destination:
    """Take `DST[:PORT][/PROTO]` apart. `a/tcp` without a port is an object of namespace `a`, unless `a` is an
    address or has a slash itself. Raises TraceError."""
    name, slash, last = text.rpartition("/")
    protocol = _PROTOCOLS.get(last.lower()) if slash else None
    if protocol is not None:
        rest, port = _split_port(name)
        if port or "/" in name or _as_address(rest) is not None:
            return Destination(name=rest, port=port, protocol=protocol)
    rest, port = _split_port(text)
    return Destination(name=rest, port=port)


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


def _as_address(text: str) -> str | None:
    try:
        return address(text)
    except ValueError:
        return None


class Places:
    """Finds what a person names."""

    def __init__(self, snapshot: Snapshot, outside: Sequence[str] = OUTSIDE, pods: Iterable[Place] = ()) -> None:
        self.snapshot = snapshot
        self._services = snapshot.services
        self._places: list[Place] = [Place(kind="outside", name="outside", addresses=tuple(outside))]
        for node in snapshot.nodes.values():
            ips = (*node.internal_ips, *node.external_ips)
            self._places.append(Place(kind="node", name=node.name, addresses=ips, node=node.name))
        known: dict[str, Place] = {place.name: place for place in pods}
        for pod in snapshot.pods.values():
            known.setdefault(
                str(pod.key), Place(kind="pod", name=str(pod.key), addresses=pod.ips, node=pod.spec.node_name)
            )
        for name, place in _targets(snapshot).items():
            known.setdefault(name, place)
        self._places += [known[name] for name in sorted(known)]

    def sender(self, text: str) -> Place:
        """An address, a pod, a node or `outside`. Raises TraceError."""
        literal = _as_address(text)
        if literal is not None:
            return Place(kind="address", name=literal, addresses=(literal,), node=self._node_of(literal))
        return self._one(text, [place for place in self._places if _is(place, text)])

    def destination(self, text: str) -> Place:
        """Also a Service; a Service wins over a pod of the same name. Raises TraceError."""
        literal = _as_address(text)
        if literal is not None:
            return Place(kind="address", name=literal, addresses=(literal,), node=self._node_of(literal))
        services = [
            Place(kind="Service", name=str(key), addresses=tuple(ip for ip in found.cluster_ips if ip != "None"),
                  service=found)
            for key, found in sorted(self._services.items())
        ]  # fmt: skip
        found = [place for place in services if _is(place, text)]
        return self._one(text, found or [place for place in self._places if _is(place, text)], services)

    def knows(self, text: str) -> bool:
        """Whether something goes by exactly this name."""
        return any(_is(place, text) for place in self._places)

    def at(self, ip: str) -> Place | None:
        """The pod, node or other place that has an address."""
        return next((place for place in self._places if ip in place.addresses), None)

    def of(self, ip: str) -> Service | None:
        """The Service that owns an address."""
        for key in sorted(self._services):
            found = self._services[key]
            balancers = tuple(entry.ip for entry in found.ingress)
            if ip in (*found.cluster_ips, *found.external_ips, *balancers):
                return found
        return None

    def _node_of(self, ip: str) -> str:
        place = self.at(ip)
        return place.node if place else ""

    def _one(self, text: str, found: list[Place], more: Sequence[Place] = ()) -> Place:
        # "web" alone means the one in the namespace `default`, as with kubectl, unless only another one exists.
        default = [place for place in found if place.name == f"default/{text}"]
        found = default or found
        if len(found) > 1:
            raise TraceError(f"{text!r} could be {', '.join(place.name for place in found)}: name it in full")
        if not found:
            known = [place.name for place in (*self._places, *more)]
            near = difflib.get_close_matches(text, known, n=3, cutoff=0.5) or known[:6]
            raise TraceError(f"there is no {text!r}; there are {', '.join(near)}, or give an address")
        if not found[0].addresses:
            raise TraceError(f"{found[0].kind} {found[0].name} has no address")
        return found[0]


def _is(place: Place, text: str) -> bool:
    kind, _, rest = text.partition("/")
    wanted = {"svc": "service"}.get(kind, kind)
    if rest and wanted in ("pod", "service", "node") and wanted == place.kind.lower():
        text = rest
    return place.name == text or ("/" in place.name and place.name.split("/", 1)[1] == text)


def _targets(snapshot: Snapshot) -> dict[str, Place]:
    """Pods that only EndpointSlices tell of."""
    found: dict[str, Place] = {}
    for slices in snapshot.slices.values():
        for each in slices.values():
            for endpoint in each.endpoints:
                if endpoint.target:
                    name = str(NamespacedName(each.namespace, endpoint.target))
                    before = found[name].addresses if name in found else ()
                    ips = tuple(dict.fromkeys((*before, endpoint.address)))
                    found[name] = Place(kind="pod", name=name, addresses=ips, node=endpoint.node_name)
    return found


def ask(
    places: Places, sender: str, destination: str, domain: str = CLUSTER_DOMAIN
) -> tuple[Place, Place, Destination]:
    """Find both ends; `domain` is the cluster's in its DNS. Raises TraceError."""
    wanted = split_destination(destination)
    source = places.sender(sender)
    if "." in wanted.name and _as_address(wanted.name) is None and not places.knows(wanted.name):
        from narthex.apps.trace_names import by_name

        return source, by_name(places, source, wanted.name, domain), wanted
    return source, places.destination(wanted.name), wanted


def question(
    places: Places, source: Place, target: Place, wanted: Destination, inputs: Inputs, host: Host, iif: str | None
) -> Question:
    """The packet that was meant. `iif`: None takes the one that fits the sender. Raises TraceError."""
    to = next((ip for ip in target.addresses if any(family_of(own) is family_of(ip) for own in source.addresses)), None)
    if to is None:
        raise TraceError(f"{source.name} and {target.name} have no IP family in common")
    family = family_of(to)
    sent_from = next(ip for ip in source.addresses if family_of(ip) is family)
    port, protocol = _port(places, target, to, wanted)
    own = sent_from in host.addresses or contains(family.loopback, sent_from)
    arrives = "" if own else _arrival(inputs, source, sent_from) if iif is None else iif
    packet = Packet(source=sent_from, destination=to, port=port, protocol=protocol, iif=arrives, from_host=own)
    return Question(packet=packet, source=source, destination=target)


def _port(places: Places, target: Place, to: str, wanted: Destination) -> tuple[int, Protocol]:
    if wanted.protocol is Protocol.ICMP:
        return 0, Protocol.ICMP
    service = target.service or places.of(to)
    ports = [each for each in (service.ports if service else ()) if wanted.protocol in (None, each.protocol)]
    if wanted.port.isascii() and wanted.port.isdigit():
        number = int(wanted.port)
        if not 0 < number < 65536:
            raise TraceError(f"{number} is not a port (1-65535)")
        same = [each.protocol for each in ports if each.port == number]
        return number, wanted.protocol or (Protocol.TCP if Protocol.TCP in same or not same else same[0])
    fitting = [each for each in ports if not wanted.port or each.name == wanted.port]
    if len(fitting) == 1:
        return fitting[0].port, fitting[0].protocol
    choices = ", ".join(
        f"{each.port}/{each.protocol.lower}" + (f" ({each.name})" if each.name else "") for each in ports
    )
    if wanted.port:
        raise TraceError(f"{wanted.port!r} is no port of {target.name}" + (f"; there are {choices}" if choices else ""))
    raise TraceError(
        f"which port of {target.name}? " + (f"There are {choices}" if choices else "Write it as NAME:PORT")
    )


def _arrival(inputs: Inputs, source: Place, sent_from: str) -> str:
    """The interface a packet of this sender comes in on, as the detection of pods would see it."""
    config = inputs.config
    here = any(contains(cidr, sent_from) for cidr in inputs.node.pod_cidrs)
    if not here and (source.kind != "pod" or source.node != config.node_name):
        return "eth0"
    if config.detect_local_mode == "InterfaceNamePrefix" and config.interface_name_prefix:
        return f"{config.interface_name_prefix}0"
    return config.bridge_interface or _DEFAULT_BRIDGE


def _relay_table(dump: Dump, family: IPFamily) -> Any:
    """The relay's listeners among the comments of a dump."""
    from narthex.backends.userspace_table import table_of

    try:
        return table_of(dump.comments, family)
    except ValueError as error:
        raise TraceError(str(error)) from error


def answer(
    asked: Question,
    inputs: Inputs,
    host: Host,
    *,
    others: dict[str, Named] | None = None,
    live_rules: Callable[[IPFamily], Any] | None = None,
    dump: Callable[[IPFamily], Dump] | None = None,
    live_route: Callable[[str], str] | None = None,
) -> Explanation:
    """Follow the packet through plan and rules. Instead of the rules that the plan would become, `live_rules` reads those
    of a running node, and `dump` what its tools have printed; `live_route` asks its routes. Raises TraceError."""
    from narthex.backends import BACKENDS
    from narthex.backends.userspace import UserspaceBackend

    backend = BACKENDS[inputs.mode]
    packet = asked.packet
    family = family_of(packet.destination)
    plan = inputs.plan(family)
    if dump is not None:
        held = dump(family)
        walked, whence = walk(held.ruleset, packet, host, beside=held.beside), "read from dumps"
        if isinstance(backend, UserspaceBackend):
            walked = backend.onwards(walked, _relay_table(held, family))
    else:
        rules = live_rules(family) if live_rules else backend.render(plan)
        if rules is None:
            raise TraceError(f"the node has no rules of mode {inputs.mode} for {family.label}")
        walked = backend.walk(rules, packet, host)
        whence = "read from the node" if live_rules else "rendered from the plan"
    case = Case(
        plan=plan,
        packet=packet,
        host=host,
        mode=inputs.mode,
        planned=evaluate(plan, packet, host, backend.deviations),
        walked=walked,
        rules=whence,
        deviations=backend.deviations,
        lookup=asked.destination.lookup,
    )
    names = Names(inputs.snapshot, others)
    route = live_route or (lambda ip: names.route(ip, inputs.config.node_name))
    explanation = explain(case, names, route)
    if asked.source.kind not in ("outside", "address") or packet.from_host:
        return explanation
    return msgspec.structs.replace(explanation, announced=_announced(inputs, packet.destination))


def _announced(inputs: Inputs, address: str) -> tuple[str, ...]:
    """Which node answers for a load balancer's address, by the objects alone; nothing for other addresses."""
    from narthex.lb.announce import Announcer, View, decide

    if not inputs.snapshot.address_pools:
        return ()
    nodes = {key.name: Announcer() for key in inputs.snapshot.nodes}
    decision = decide(View(snapshot=inputs.snapshot, announcers=nodes)).get(address)
    if decision is None:
        return ()
    here, said = inputs.config.node_name, f"{decision.holder} answers for {address}"
    if not decision.holder:
        said = f"nobody answers for {address}, so no packet comes"
    elif decision.holder != here:
        said += f", so packets come to {decision.holder} and not to {here}"
    return (said, *(f"{each.node}: {each.reason.value}: {each.text}" for each in decision.verdicts), *decision.notes)
