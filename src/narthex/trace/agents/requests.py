"""Requests of agents, checked, and the arguments of the commands that answer them.

Each tool is one command with `-o json`, so that an agent gets what a user of the command gets. All values come from a language model
that reads text of strangers. They therefore have limits, they never become options of a command, and paths stay below the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from narthex.model import visible

MOST_TEXTS, LONGEST_TEXT = 16, 32_000_000
_MOST_FILES = 32

Word = Annotated[str, msgspec.Meta(max_length=300)]
Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]


class RequestError(ValueError):
    """A request that cannot be answered; the message says what is wrong with which argument, and what to do."""


class _Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the answer comes from: pasted texts, files below the root, or this node."""

    texts: Annotated[
        tuple[Text, ...],
        msgspec.Meta(
            max_length=MOST_TEXTS,
            description="Pasted texts: iptables-save, nft list ruleset, ip route, whole bug reports, or Kubernetes objects as YAML or JSON.",
        ),
    ] = ()
    files: Annotated[
        tuple[Word, ...],
        msgspec.Meta(
            max_length=_MOST_FILES,
            description="Paths of the same kinds of text, or of bundles, relative to the folder that the user allowed with --root.",
        ),
    ] = ()
    live: Annotated[
        bool, msgspec.Meta(description="Read the rules of this node; only if the user allowed it with --live.")
    ] = False
    node: Annotated[Word, msgspec.Meta(description="Name of the node, if the input has several.")] = ""
    node_ips: Annotated[
        tuple[Word, ...], msgspec.Meta(max_length=16, description="Addresses of the node, if the input lacks them.")
    ] = ()
    cluster_cidr: Annotated[Word, msgspec.Meta(description="Networks of all pods, separated by commas.")] = ""
    mode: Annotated[
        Word, msgspec.Meta(description="nftables, iptables, ipvs, or userspace; default: as configured.")
    ] = ""


class TraceToolRequest(_Inputs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Explain the path of one packet, and name the cause if it does not arrive."""

    source: Annotated[Word, msgspec.Meta(description="An address, a pod (NAMESPACE/NAME), a node, or `outside`.")]
    destination: Annotated[
        Word,
        msgspec.Meta(description="ADDRESS:PORT/PROTOCOL, a Service (NAMESPACE/NAME), a pod, or a node with a port."),
    ]


class CheckToolRequest(_Inputs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compare the objects of a cluster with the rules of a node."""

    service: Annotated[
        Word, msgspec.Meta(description="Only packets to this Service, NAMESPACE/NAME; implies prove.")
    ] = ""
    prove: Annotated[bool, msgspec.Meta(description="Prove it for all packets; takes longer.")] = False


class PlanToolRequest(_Inputs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show the decision for every packet to a Service, from the objects alone."""

    service: Annotated[Word, msgspec.Meta(description="Only this Service in the short answer: NAMESPACE/NAME.")] = ""


class QueryToolRequest(_Inputs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a question about all packets of a node."""

    question: Annotated[
        Word,
        msgspec.Meta(
            description="One of: who reaches ADDRESS:PORT?; what can SENDER reach?; where does ADDRESS:PORT/PROTOCOL from SENDER go?; "
            "which Services can leave this node without masquerade?"
        ),
    ]


class CausesToolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the causes that Narthex knows, or show the page of one."""

    cause: Annotated[Word, msgspec.Meta(description="ID of a cause, for example forward-drop. Empty: all causes.")] = ""


class EvidenceToolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read the evidence that an answer refers to, or a part of it."""

    reference: Annotated[
        Word,
        msgspec.Meta(
            description="As in an answer, with the path of a part if necessary: narthex://evidence/3/findings/0."
        ),
    ]


def read_request(kind: type[msgspec.Struct], arguments: Mapping[str, Any]) -> Any:
    """Return the request of a tool. Raises RequestError that names the argument that is wrong."""
    try:
        request = msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    for name in request.__struct_fields__:
        if name == "texts":
            continue
        value = getattr(request, name)
        for word in value if isinstance(value, tuple) else (value,):
            if isinstance(word, str) and word != visible(word):
                raise RequestError(f"argument {name} has control characters: leave them out")
    return request


_NOTHING = (
    "there is nothing to read: pass the output of tools (iptables-save, nft list ruleset), or Services and EndpointSlices as "
    "YAML or JSON, in `texts`"
)


def command_of(request: Any, sources: Sequence[str], *, live_allowed: bool) -> list[str]:
    """Return the words of the command that answers a request.

    Args:
        request: Of any tool that runs a command.
        sources: The options that name texts and files, which are stored already.
        live_allowed: The user lets agents read this node.
    """
    if request.live and not live_allowed:
        raise RequestError("live is not allowed here: the user must start `narthex mcp` with --live")
    if not sources and not request.live:
        raise RequestError(_NOTHING)
    words = [*sources, *_options(request), *(["--live"] if request.live else []), "--output=json"]
    match request:
        case TraceToolRequest():
            return ["trace", *words, "--", request.source, request.destination]
        case CheckToolRequest():
            service = [f"--service={request.service}"] if request.service else []
            return ["check", *words, *service, *(["--prove"] if request.prove or service else [])]
        case PlanToolRequest():
            return ["plan", *words]
        case QueryToolRequest():
            return ["query", *words, "--", request.question]
    raise TypeError(f"{request!r} runs no command")


def _options(request: _Inputs) -> list[str]:
    # One word for option and value: a value that begins with a dash stays a value.
    words = [f"--node-ip={ip}" for ip in request.node_ips]
    named = {"node": request.node, "cluster-cidr": request.cluster_cidr, "mode": request.mode}
    return words + [f"--{name}={value}" for name, value in named.items() if value]
