"""Packet-flow scenarios: a node, a set of Kubernetes objects, and what must happen to single packets.

The format is described in docs/reference/scenarios.md. Loading is strict about what carries meaning (an unknown key of
`node.config` is an error) and lenient about the rest (an unknown key of a flow is a warning).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from narthex.model import NODE_PORT_WORDS, AnyObject, Protocol, Service, address, family_of, network, split_port
from narthex.model.decode.objects import decode
from narthex.testing.findings import DROP, NONE, REJECT, Ends, delivered

KNOWN_MODES = ("nftables", "iptables", "ipvs", "userspace")
"""What a file may name; that a mode has a backend is another matter."""

_TOP = {"name", "summary", "source", "basis", "level", "since", "modes", "node", "objects", "flows", "steps"}
_CONFIG = {
    "detectLocalMode", "clusterCIDR", "bridgeInterface", "interfaceNamePrefix", "masqueradeAll", "nodePortAddresses",
    "localhostNodePorts", "featureGates",
}  # fmt: skip
_CONNECTION = {"from", "to", "port", "proto", "iface", "modes"}
_FLOW = _CONNECTION | {"label", "expect", "level", "since", "source", "basis", "summary"}
_STEP = _CONNECTION | {"at", "pick", "label"}
_DETECT = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}", re.ASCII)
_PICK = re.compile(r"any|(?P<how>same-as|differs-from)-(?P<step>\d+)", re.ASCII)


class ScenarioError(ValueError):
    """A file is not a valid scenario; the message names the file and the key."""


class _Wrong(ValueError):
    """What is wrong at a key, before the file's name is known."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)


class ScenarioConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A new connection as the node sees it before any rewriting. Addresses are canonical."""

    source: str
    destination: str
    port: int
    protocol: Protocol
    iface: str = ""
    """Interface it arrives on; empty: by the rule of `setting.arrival`."""
    modes: tuple[str, ...] = ()


class ScenarioFlow(ScenarioConnection, frozen=True, kw_only=True):
    """One connection and the complete set of its possible ends."""

    label: str
    expect: Ends
    level: str = "must"


class ScenarioStep(ScenarioConnection, frozen=True, kw_only=True):
    """One connection of a sequence, for affinity and round robin."""

    number: int
    """Its place in the file, from 0."""
    at: float
    """Seconds since the first."""
    pick: str
    """`any`, `same-as-N` or `differs-from-N`."""

    @property
    def refers_to(self) -> int | None:
        """Return the number of the step that `pick` refers to, or None for `any`."""
        match = _PICK.fullmatch(self.pick)
        return int(match["step"]) if match and match["step"] else None

    def allows(self, picked: object, before: object) -> bool:
        """Return True if an endpoint fits, given the endpoint of the step that `pick` refers to."""
        if self.refers_to is None:
            return True
        return (picked == before) is self.pick.startswith("same")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`node.config` of a scenario; None where the mode's default applies."""

    detect_local_mode: str = "ClusterCIDR"
    cluster_cidrs: tuple[str, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    masquerade_all: bool = False
    node_port_addresses: tuple[str, ...] | None = None
    localhost_node_ports: bool | None = None
    feature_gates: tuple[tuple[str, bool], ...] = ()

    def gate(self, name: str) -> bool | None:
        """Return the value of a feature gate, or None if the file does not set it."""
        return dict(self.feature_gates).get(name)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario file."""

    name: str
    path: str
    level: str
    modes: tuple[str, ...]
    node_name: str
    node_ips: tuple[str, ...]
    pod_cidrs: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]
    config: Config
    objects: tuple[AnyObject, ...]
    flows: tuple[ScenarioFlow, ...]
    steps: tuple[ScenarioStep, ...]
    warnings: tuple[str, ...] = ()
    """What was not understood but does not stop the file."""

    def flows_in(self, mode: str) -> tuple[ScenarioFlow, ...]:
        """Return the flows that apply to a mode."""
        return tuple(flow for flow in self.flows if self._applies(flow, mode))

    def steps_in(self, mode: str) -> tuple[ScenarioStep, ...]:
        """Return the steps that apply to a mode."""
        return tuple(step for step in self.steps if self._applies(step, mode))

    def _applies(self, connection: ScenarioConnection, mode: str) -> bool:
        modes = connection.modes or self.modes
        return mode in modes

    @property
    def services(self) -> tuple[Service, ...]:
        """Return the Services among the objects."""
        return tuple(obj for obj in self.objects if isinstance(obj, Service))


def find(paths: list[Path]) -> list[Path]:
    """Return the scenario files in these files and directories, in order.

    Raises ScenarioError if a name is not a file, or if a directory holds no scenario.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
            if not inside:
                raise ScenarioError(f"{path}: no *.yaml file in this directory")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ScenarioError(f"{path}: no such file or directory")
    return list(dict.fromkeys(found))


def load(path: Path) -> Scenario:
    """Read a file. Raises ScenarioError with the name of the file and the invalid key."""
    try:
        doc = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ScenarioError(f"{path}: cannot be read: {_one_line(error)}") from None
    try:
        return parse(doc, str(path), path.stem)
    except _Wrong as error:
        raise ScenarioError(f"{path}: {error}") from None


def parse(doc: object, origin: str, stem: str) -> Scenario:
    """Return the scenario in a YAML document. Raises ValueError with the invalid key."""
    if not isinstance(doc, dict):
        raise _Wrong("", "not a scenario: the document is not a mapping")
    for key in doc.keys() - _TOP:
        raise _Wrong(str(key), "unknown key")
    modes = _modes(doc, "modes", ("nftables", "iptables"))
    node = _mapping(doc, "node")
    warnings: list[str] = []
    flows = _each(doc, "flows", lambda raw, key: _flow(raw, key, modes, origin, warnings))
    steps = _each(doc, "steps", lambda raw, key: _step(raw, key, modes, origin, warnings))
    _check_steps(steps)
    if not flows and not steps:
        raise _Wrong("flows", "there is no flow")
    level = doc.get("level", "must")
    if level not in ("must", "quirk"):
        raise _Wrong("level", f"{level!r} is neither must nor quirk")
    return Scenario(
        name=_text(doc, "name", stem),
        path=origin,
        level=level,
        modes=modes,
        node_name=_text(node, "name", "node", "node."),
        node_ips=tuple(_converted(address, text, "node.ips") for text in _list(node, "ips", "node.")),
        pod_cidrs=tuple(_converted(network, text, "node.podCIDRs") for text in _list(node, "podCIDRs", "node.")),
        labels=tuple(sorted((str(k), str(v)) for k, v in _mapping(node, "labels", "node.").items())),
        config=_config(_mapping(node, "config", "node.")),
        objects=_objects(doc, origin, warnings),
        flows=flows,
        steps=steps,
        warnings=tuple(warnings),
    )


def _objects(doc: dict[str, Any], origin: str, warnings: list[str]) -> tuple[AnyObject, ...]:
    """Return the objects that decode; like the proxy, leave out the others with a warning."""
    objects = []
    for number, raw in enumerate(_list(doc, "objects")):
        if not isinstance(raw, dict):
            raise _Wrong(f"objects[{number}]", "not a mapping")
        done = decode(raw, origin)
        warnings += [str(problem) for problem in done.problems]
        if done.object is not None:
            objects.append(done.object)
    return tuple(objects)


def _config(raw: dict[str, Any]) -> Config:
    for key in raw.keys() - _CONFIG:
        raise _Wrong(f"node.config.{key}", "unknown setting")
    detect = raw.get("detectLocalMode", "ClusterCIDR")
    if detect not in _DETECT:
        raise _Wrong("node.config.detectLocalMode", f"{detect!r} is none of {', '.join(filter(None, _DETECT))}")
    cidrs = [part.strip() for part in str(raw.get("clusterCIDR") or "").split(",") if part.strip()]
    addresses = raw.get("nodePortAddresses")
    localhost = raw.get("localhostNodePorts")
    return Config(
        detect_local_mode=detect,
        cluster_cidrs=tuple(_converted(network, cidr, "node.config.clusterCIDR") for cidr in cidrs),
        bridge_interface=_interface(raw.get("bridgeInterface"), "node.config.bridgeInterface"),
        interface_name_prefix=_interface(raw.get("interfaceNamePrefix"), "node.config.interfaceNamePrefix"),
        masquerade_all=_bool(raw.get("masqueradeAll", False), "node.config.masqueradeAll"),
        node_port_addresses=None if addresses is None else _node_port_addresses(addresses),
        localhost_node_ports=None if localhost is None else _bool(localhost, "node.config.localhostNodePorts"),
        feature_gates=tuple(
            sorted(
                (str(gate), _bool(on, f"node.config.featureGates.{gate}"))
                for gate, on in _mapping(raw, "featureGates", "node.config.").items()
            )
        ),
    )


def _node_port_addresses(raw: object) -> tuple[str, ...] | None:
    key = "node.config.nodePortAddresses"
    words = raw if isinstance(raw, list) else [raw]
    if not words:
        return None
    return tuple(word if word in NODE_PORT_WORDS else _converted(network, word, key) for word in words)


def _connection(raw: dict[str, Any], key: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that flows and steps share."""
    for needed in ("from", "to", "port"):
        if needed not in raw:
            raise _Wrong(f"{key}.{needed}", "missing")
    source = _converted(address, raw["from"], f"{key}.from")
    destination = _converted(address, raw["to"], f"{key}.to")
    if family_of(source) is not family_of(destination):
        raise _Wrong(key, f"{source} and {destination} are of two families")
    port, proto = raw["port"], raw.get("proto", "TCP")
    if not isinstance(port, int) or not 0 < port < 65536:
        raise _Wrong(f"{key}.port", f"{port!r} is no port")
    if proto not in ("TCP", "UDP", "SCTP"):
        raise _Wrong(f"{key}.proto", f"{proto!r} is none of TCP, UDP, SCTP")
    own = _modes(raw, f"{key}.modes", modes) if "modes" in raw else ()
    if set(own) - set(modes):
        raise _Wrong(f"{key}.modes", "names a mode that the file does not")
    return {
        "source": source,
        "destination": destination,
        "port": port,
        "protocol": Protocol(proto),
        "iface": _interface(raw.get("iface"), f"{key}.iface"),
        "modes": own,
    }


def _flow(raw: dict[str, Any], key: str, modes: tuple[str, ...], origin: str, warnings: list[str]) -> ScenarioFlow:
    warnings += [f"{origin}: {key}.{name}: unknown key, not read" for name in sorted(raw.keys() - _FLOW, key=str)]
    if "expect" not in raw:
        raise _Wrong(f"{key}.expect", "missing")
    fields = _connection(raw, key, modes)
    label = _text(raw, "label", f"{fields['source']} to {fields['destination']}:{fields['port']}", f"{key}.")
    return ScenarioFlow(
        label=label, expect=expectation(raw["expect"], f"{key}.expect"), level=raw.get("level", "must"), **fields
    )


def _step(raw: dict[str, Any], key: str, modes: tuple[str, ...], origin: str, warnings: list[str]) -> ScenarioStep:
    warnings += [f"{origin}: {key}.{name}: unknown key, not read" for name in sorted(raw.keys() - _STEP, key=str)]
    at, pick = raw.get("at"), raw.get("pick", "any")
    if isinstance(at, bool) or not isinstance(at, int | float) or at < 0:
        raise _Wrong(f"{key}.at", f"{at!r} is no time in seconds")
    if not isinstance(pick, str) or not _PICK.fullmatch(pick):
        raise _Wrong(f"{key}.pick", f"{pick!r} is none of any, same-as-N, differs-from-N")
    number = int(key.partition("[")[2].rstrip("]"))
    return ScenarioStep(number=number, at=float(at), pick=pick, **_connection(raw, key, modes))


def _check_steps(steps: tuple[ScenarioStep, ...]) -> None:
    for number, step in enumerate(steps):
        if step.refers_to is not None and step.refers_to >= number:
            raise _Wrong(f"steps[{number}].pick", f"{step.pick!r} does not refer to an earlier step")
        if number and step.at < steps[number - 1].at:
            raise _Wrong(f"steps[{number}].at", "goes back in time")


def expectation(raw: object, key: str = "expect") -> Ends:
    """Return the ends that an `expect` means. Raises ValueError with the invalid key."""
    if isinstance(raw, str):
        words = {"reject": REJECT, "drop": DROP, "none": NONE}
        if raw not in words:
            raise _Wrong(key, f"{raw!r} is none of reject, drop, none")
        return words[raw]
    if not isinstance(raw, dict) or not isinstance(raw.get("dnat"), list) or not raw["dnat"]:
        raise _Wrong(key, "neither a word (reject, drop, none) nor {dnat: [ip:port, …], masq: …}")
    for name in raw.keys() - {"dnat", "masq", "masq_for"}:
        raise _Wrong(f"{key}.{name}", "unknown key")
    targets = [_converted(split_port, text, f"{key}.dnat") for text in raw["dnat"]]
    masq_for = [_converted(split_port, text, f"{key}.masq_for") for text in _list(raw, "masq_for", f"{key}.")]
    if set(masq_for) - set(targets):
        raise _Wrong(f"{key}.masq_for", "names a target that is not in dnat")
    return delivered(targets, _bool(raw.get("masq", False), f"{key}.masq"), masq_for)


def _each(doc: dict[str, Any], key: str, make: Callable[[dict[str, Any], str], Any]) -> tuple[Any, ...]:
    made = []
    for number, raw in enumerate(_list(doc, key)):
        if not isinstance(raw, dict):
            raise _Wrong(f"{key}[{number}]", "not a mapping")
        made.append(make(raw, f"{key}[{number}]"))
    return tuple(made)


def _modes(raw: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    modes = raw.get("modes")
    if modes is None:
        return default
    if not isinstance(modes, list) or not modes or any(mode not in KNOWN_MODES for mode in modes):
        raise _Wrong(key, f"{modes!r} is no list of {', '.join(KNOWN_MODES)}")
    return tuple(modes)


def _interface(raw: object, key: str) -> str:
    """Return an interface name or prefix. Only harmless characters pass, since it reaches `ip` and the rules."""
    if raw is None or raw == "":
        return ""
    if not isinstance(raw, str) or not _INTERFACE.fullmatch(raw) or raw in ("all", "default"):
        raise _Wrong(key, f"{raw!r} is no interface name")
    return raw


def _converted(convert: Callable[[str], Any], raw: object, key: str) -> Any:
    try:
        return convert(str(raw).strip())
    except ValueError as error:
        raise _Wrong(key, str(error)) from None


def _mapping(raw: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Wrong(prefix + key, "not a mapping")
    return value


def _list(raw: Mapping[str, Any], key: str, prefix: str = "") -> list[Any]:
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Wrong(prefix + key, "not a list")
    return value


def _text(raw: Mapping[str, Any], key: str, default: str, prefix: str = "") -> str:
    value = raw.get(key, default)
    if isinstance(value, dict | list):
        raise _Wrong(prefix + key, "not a text")
    return str(value)


def _bool(raw: object, key: str) -> bool:
    if not isinstance(raw, bool):
        raise _Wrong(key, f"{raw!r} is neither true nor false")
    return raw


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
