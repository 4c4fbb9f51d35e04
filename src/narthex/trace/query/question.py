"""The grammar of questions: a table of forms with places for targets and senders."""

from __future__ import annotations

import difflib
import re
from enum import Enum
from typing import NamedTuple

import msgspec

from narthex.model import InputError, Protocol, address, network, split_port

_PROTOCOLS = {each.lower: each for each in Protocol}


class QuestionKind(Enum):
    """What is asked for."""

    REACHES = "reaches"
    """Who reaches a target."""
    CAN_REACH = "can reach"
    """What a sender can reach."""
    GOES = "goes"
    """Where packets for a target go."""
    FATE = "fate"
    """Which packets have an end of a kind."""
    UNMASKED = "without masquerade"
    """Which Services have packets that leave the node with the sender's address."""


class QuestionTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What packets are sent to: an address, a Service, or a pod; or an endpoint that they get to."""

    address: str = ""
    service: str = ""
    """`shop/web`, or `shop/web:http` for one Service port."""
    pod: str = ""
    """`shop/web-1`."""
    port: int | None = None
    protocol: Protocol | None = None


class QuestionSender(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends: a class of senders, a network, or a pod. All empty: anyone."""

    group: str = ""
    """`outside`, `pods`, `nodes`, or `this node`."""
    node: str = ""
    """For pods: those of this node."""
    network: str = ""
    """An address or a network."""
    pod: str = ""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question that was understood."""

    text: str
    """As it was asked, without superfluous spaces."""
    kind: QuestionKind
    target: QuestionTarget | None = None
    sender: QuestionSender = QuestionSender()
    fate: str = ""
    """`refused`, `dropped`, `masqueraded`, `left alone`, or `undecided`."""


class QuestionForm(NamedTuple):
    """A form of questions."""

    words: str
    """With TARGET, SENDER, and FATE as places; parts in brackets may be left out."""
    kind: QuestionKind
    meaning: str
    example: str


FORMS = (
    QuestionForm(
        "who reaches TARGET [from SENDER]",
        QuestionKind.REACHES,
        "the senders and frontends by which packets get to an endpoint, or what happens at the frontends of a Service",
        "who reaches 10.244.2.7:8080?",
    ),
    QuestionForm("what reaches TARGET [from SENDER]", QuestionKind.REACHES, "the same", "what reaches shop/web?"),
    QuestionForm(
        "what can SENDER reach",
        QuestionKind.CAN_REACH,
        "the frontends at which packets of the sender get to an endpoint",
        "what can outside reach?",
    ),
    QuestionForm(
        "where does TARGET [from SENDER] go",
        QuestionKind.GOES,
        "what happens to packets for an address or a Service",
        "where does 10.96.0.10:53/udp from pods go?",
    ),
    QuestionForm(
        "what is FATE [from SENDER] [to TARGET]",
        QuestionKind.FATE,
        "the packets that are refused, dropped, masqueraded, left alone, or undecided",
        "what is dropped from outside?",
    ),
    QuestionForm(
        "which Services can leave this node without masquerade [from SENDER]",
        QuestionKind.UNMASKED,
        "the Services whose packets reach endpoints on other nodes with the address of their sender",
        "which Services can leave this node without masquerade?",
    ),
)
TARGETS = "ADDRESS[:PORT][/PROTOCOL], NAMESPACE/SERVICE[:PORT], or pod NAMESPACE/NAME[:PORT]"
SENDERS = "anyone, outside, pods, pods on NODE, nodes, this node, an address, a network, or pod NAMESPACE/NAME"
FATES = ("refused", "dropped", "masqueraded", "left alone", "undecided")
_PLACES = {"TARGET": r"(?P<target>\S.*?)", "SENDER": r"(?P<sender>\S.*?)", "FATE": f"(?P<fate>{'|'.join(FATES)})"}
_NAME = r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*"
_SERVICE = re.compile(rf"({_NAME})(?::([a-z0-9-]+))?")
_GROUPS = {"outside": "outside", "pods": "pods", "nodes": "nodes", "other nodes": "nodes", "this node": "this node"}


def _expression(words: str) -> re.Pattern[str]:
    parts = []
    for part in re.split(r" (?=\[)|(?<=\]) ", words):
        inner = part.strip("[]")
        text = " ".join(_PLACES.get(word, re.escape(word)) for word in inner.split(" "))
        parts.append(f"(?: {text})?" if part.startswith("[") else f" {text}")
    return re.compile("".join(parts).lstrip() + r" ?\??", re.IGNORECASE)


_EXPRESSIONS = [(form, _expression(form.words)) for form in FORMS]


def read_question(asked: str) -> Question:
    """Return what a question means. Raises InputError, which lists the forms, for all others."""
    text = " ".join(asked.split())
    for form, expression in _EXPRESSIONS:
        match = expression.fullmatch(text)
        if match is None:
            continue
        found = match.groupdict()
        return Question(
            text=text,
            kind=form.kind,
            target=_target(found["target"]) if found.get("target") else None,
            sender=_sender(found["sender"]) if found.get("sender") else QuestionSender(),
            fate=(found.get("fate") or "").lower(),
        )
    raise InputError(
        f"{asked!r} is no question that has an answer here. The nearest form: {_nearest(text)}?\n{forms_text()}"
    )


def forms_text() -> str:
    """Return the forms of questions, one a line."""
    lines = [f"  {form.words}?" for form in FORMS]
    return "\n".join(
        [
            "Forms of questions (parts in brackets may be left out):",
            *lines,
            f"TARGET: {TARGETS}",
            f"SENDER: {SENDERS}",
            f"FATE: {', '.join(FATES)}",
        ]
    )


def _nearest(text: str) -> str:
    words = set(re.findall(r"[a-z]+", text.lower()))

    def likeness(form: QuestionForm) -> tuple[int, float]:
        """Return how many words a form shares with the question, and how alike both are as texts."""
        shared = words & set(re.findall(r"[a-z]+", form.words))
        return len(shared), difflib.SequenceMatcher(None, text.lower(), form.words.lower()).ratio()

    return max(FORMS, key=likeness).words


def _target(text: str) -> QuestionTarget:
    pod, _, rest = text.partition(" ")
    if pod.lower() == "pod":
        name, port = _named(rest, "pod")
        if port is not None and not port.isdigit():
            raise InputError(f"{text}: the port of a pod is a number")
        return QuestionTarget(pod=name, port=int(port) if port else None)
    if _SERVICE.fullmatch(text) and not _is_address(text.partition("/")[0]):
        name, port = _named(text, "Service")
        if port is not None and port.isdigit():
            return QuestionTarget(service=name, port=int(port))
        return QuestionTarget(service=f"{name}:{port}" if port else name)
    where, _, protocol = text.partition("/")
    if protocol and protocol.lower() not in _PROTOCOLS:
        raise InputError(f"{text}: {protocol} is no protocol; choose {', '.join(_PROTOCOLS)}")
    try:
        host, number = (where, None) if _is_address(where) else split_port(where)
        found = address(host.strip("[]"))
    except ValueError as error:
        raise InputError(f"{text!r} is no target: {error}. A target is {TARGETS}") from error
    return QuestionTarget(address=found, port=number, protocol=_PROTOCOLS.get(protocol.lower()))


def _named(text: str, kind: str) -> tuple[str, str | None]:
    match = _SERVICE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no {kind}: expected NAMESPACE/NAME")
    return match[1], match[2]


def _sender(text: str) -> QuestionSender:
    lowered = text.lower()
    if lowered in ("anyone", "anybody", "all"):
        return QuestionSender()
    if lowered in _GROUPS:
        return QuestionSender(group=_GROUPS[lowered])
    first, _, rest = text.partition(" ")
    if lowered.startswith("pods on ") and (node := text[len("pods on ") :]):
        return QuestionSender(group="pods", node=node)
    if first.lower() == "pod":
        return QuestionSender(pod=_named(rest, "pod")[0])
    try:
        return QuestionSender(network=network(text) if "/" in text else address(text))
    except ValueError as error:
        raise InputError(f"{text!r} is no sender: {error}. A sender is {SENDERS}") from error


def _is_address(text: str) -> bool:
    try:
        return bool(address(text.strip("[]")))
    except ValueError:
        return False
