"""Why a Service's addresses are answered for, or not: one look at a cluster, and at its announcers where they can be asked."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from narthex.kube.access import Access
from narthex.lb import why
from narthex.lb.announce import Announcer, View, announced, decide
from narthex.lb.heartbeat import State
from narthex.lb.program.announcer import PATH
from narthex.lb.program.look import Look, look
from narthex.lb.status import LOAD_BALANCER
from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, family_of
from narthex.model.store import Snapshot

_ASK_SECONDS = 1.0
_AT_ONCE = 32
_MOST_BYTES = 16 << 20
STATUS_PORT = 10249

States = Mapping[str, Mapping[str, Any]]
"""What announcers say of themselves, by node."""


class WhyError(ValueError):
    """The question cannot be answered; the message says why and what to do."""


def why_service(
    text: str,
    *,
    manifests: Path | None = None,
    access: Access | None = None,
    config: Path | None = None,
    status_port: int = STATUS_PORT,
    states: States | None = None,
) -> why.ServiceSays:
    """Everything about a Service, named `NAMESPACE/NAME`, or `NAME` in the namespace `default`. `config`: pools of a file.
    `status_port`: where nodes' announcers are asked; 0: they are not. `states`: what they have said, by node, where they
    were asked already. Raises WhyError, LookError."""
    found = look(manifests=manifests, access=access, config=config, endpoints=True)
    snapshot = found.snapshot
    key = _named(snapshot, text)
    asked = states is not None or bool(status_port)
    if states is None:
        states = _states(snapshot, status_port) if status_port else {}
    view = View(snapshot=snapshot, announcers=announcers(snapshot, states))
    decisions = [decision for decision in decide(view).values() if key in decision.services]
    seen = {node: why.read_state(state) for node, state in states.items()}
    said = why.says(str(key), decisions, seen)
    return msgspec.structs.replace(said, notes=tuple(_notes(found, key, states, asked=asked)))


def read_status(data: bytes) -> Mapping[str, Any] | None:
    """What an announcer's status port said (`docs/reference/announcer.md`); None when it is not that."""
    try:
        found: Mapping[str, Any] = msgspec.to_builtins(msgspec.json.decode(data, type=_State))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return found


def announcers(snapshot: Snapshot, states: States) -> dict[str, Announcer]:
    """What is known of each node's announcer: by itself, else by another one, else nothing, and then it is taken to be
    alive."""
    told: dict[str, Announcer] = {}
    for state in states.values():
        for peer in state.get("peers", ()):
            told[peer["node"]] = Announcer(
                state=State(peer["state"]),
                leaving=peer["leaving"],
                standing_back=peer["standingBack"],
                links=tuple(peer["links"]) if peer["state"] == State.ALIVE.value else None,
            )
    for node, state in states.items():
        links = tuple(link["name"] for link in state.get("links", ()))
        told[node] = Announcer(links=links, leaving=state["leaving"], standing_back=state["standingBack"])
    return {key.name: told.get(key.name, Announcer()) for key in snapshot.nodes}


def _named(snapshot: Snapshot, text: str) -> NamespacedName:
    namespace, slash, name = text.rpartition("/")
    key = NamespacedName(namespace if slash else "default", name)
    if key in snapshot.services:
        return key
    same = sorted(str(each) for each in snapshot.services if each.name == name)
    if not slash and len(same) == 1:
        return next(each for each in snapshot.services if each.name == name)
    hint = f"; there is {', '.join(same)}" if same else ""
    raise WhyError(f"there is no Service {key}{hint}: name it as NAMESPACE/NAME")


def _notes(found: Look, key: NamespacedName, states: Mapping[str, Any], *, asked: bool) -> list[str]:
    service = found.snapshot.services[key]
    notes = []
    if service.type != LOAD_BALANCER:
        notes.append(f"it is of type {service.type}, so it has no address to announce")
    elif not announced(service):
        decision = found.decisions.get(key)
        refusal = decision.refusal if decision else None
        reason = (
            f": {refusal.text}; {refusal.advice}" if refusal else ": does a controller run (narthex lb controller)?"
        )
        notes.append(f"its status has no address{reason}")
    silent = [name.name for name in sorted(found.snapshot.nodes) if name.name not in states]
    if asked and silent and notes == []:
        notes.append(f"no announcer could be asked on {', '.join(silent)}: what others or the objects say is shown")
    return notes


def _states(snapshot: Snapshot, port: int) -> States:
    """What the announcers say that answer, by node."""
    ways = {key.name: (*node.internal_ips, *node.external_ips) for key, node in sorted(snapshot.nodes.items())}
    reachable = {name: addresses[0] for name, addresses in ways.items() if addresses}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda address: _ask(address, port), reachable.values())
        return {name: state for name, state in zip(reachable, answers, strict=True) if state is not None}


def _ask(address: str, port: int) -> Mapping[str, Any] | None:
    host = f"[{address}]" if family_of(address) is IPFamily.IPV6 else address
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_SECONDS)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        data = answer.read(_MOST_BYTES)
        return read_status(data) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class _Peer(msgspec.Struct, rename="camel"):
    node: str
    state: State
    leaving: bool
    standing_back: bool
    links: list[str]


class _State(msgspec.Struct, rename="camel"):
    """As much of an announcer's status as is looked at here; `why.read_state` reads the addresses."""

    node: str
    leaving: bool
    standing_back: bool
    links: list[dict[str, Any]]
    peers: list[_Peer]
    addresses: list[dict[str, Any]]
