"""`narthex trace`: the explained path of one packet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from narthex.cli.inputs import (
    cluster_of,
    has_source,
    node_options,
    node_options_of,
    options,
    source_options,
    viewed,
    views_of,
)
from narthex.cli.options import lab_option
from narthex.cli.output import json_text, working
from narthex.cli.terminal import color_option, line_width, print_lines
from narthex.model import InputError, IPFamily, Snapshot, address, visible
from narthex.netfilter.dump.read import DumpError, WalkInput, merge_dumps, read_dump
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.document import ProbeRecord, trace_document
from narthex.trace.model import Fate, PacketPath, branch_ends
from narthex.trace.program.places import CLUSTER_DOMAIN, OUTSIDE_NAMES
from narthex.trace.program.rules_trace import TracedPath, trace_by_objects
from narthex.trace.program.travel import KnownCluster, TraceRequest, from_files, texts_of, travel, travel_live
from narthex.trace.render.styled import Span
from narthex.trace.render.text import lines

if TYPE_CHECKING:
    from narthex.trace.program.kernel_probe import ProbeComparison


NOT_KNOWN = 3
"""Exit status if the input does not decide where the packet ends, at least for some connections."""
PICTURES = ("dot", "mermaid", "html", "svg")

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", *PICTURES]),
    default="text",
    show_default=True,
    help="html and svg are self-contained files, for tickets; dot and mermaid are graphs for other tools.",
)


@click.command()
@click.argument("source", metavar="SRC", required=False, default="")
@click.argument("destination", metavar="DST[:PORT][/PROTO]", required=False, default="")
@source_options
@lab_option
@options
@node_options
@click.option(
    "--cluster-domain",
    "domain",
    default=CLUSTER_DOMAIN,
    show_default=True,
    metavar="ZONE",
    help="What the names in the cluster's DNS end in, where DST is a name.",
)
@click.option("--iif", metavar="NAME", help="The interface that the packet comes in on. Default: one that fits SRC.")
@click.option("--sport", "source_port", type=click.IntRange(1, 65535), help="The port that the packet comes from.")
@click.option(
    "--size", type=click.IntRange(0, 65535), default=0, help="Bytes of the packet, which may not be cut in pieces."
)
@click.option(
    "--probe",
    is_flag=True,
    help="Also send ONE packet, with --live from a pod of this node or the node itself, or in a lab, and compare the kernel's "
    "own trace (nft monitor trace) with the prediction; the exit status is 1 where they part.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Every rule with its file and line, rules that nearly matched, the path of the reply, and what is unknown.",
)
@output_option
@color_option
def command(
    source: str, destination: str, lab: str | None, probe: bool, every: bool, output: str, color: str, **given: Any
) -> None:
    """Explain the path of the first packet of a new connection from SRC to DST, step by step.

    SRC is an address, a pod (pod/NAMESPACE/NAME or NAMESPACE/NAME), a node, or `outside`. DST is one of these, a Service, or from a pod a
    name with a dot, for the cluster's DNS; without PORT it is the Service's only one. PROTO is tcp, udp, sctp or icmp. A text of
    `narthex bundle --for-issue` names both, so that --bundle FILE is enough.

    Without a bundle, --live or --lab, the rules are those that the objects become, or those of --rules. With them, the packet is followed
    over links, routes and nodes, and --manifests or --kubeconfig provide the names.

    \b
    Exit status:
        0  the packet's path is explained, wherever it ends
        1  an error; with --probe also: the kernel did not do what was predicted
        2  wrong usage
        3  the path is unknown, or only for some connections: input is missing

    \b
        narthex trace outside 192.168.49.11:30001 --bundle node-1.tgz --bundle node-2.tgz
        narthex trace --bundle issue.md
        narthex trace 10.244.1.7 10.96.0.10:53/udp --rules iptables-save.txt --rules ip-route.txt
        narthex trace 10.244.1.7 10.96.0.10:53/udp --live --probe
        narthex trace shop/client shop/web --manifests DIR --node worker-a
        narthex trace shop/client web.shop:80 --manifests DIR
        narthex trace outside worker-a:30001 --manifests DIR
        narthex trace outside shop/web --manifests DIR --mode ipvs --rules iptables.txt --rules ipset.txt --rules ipvs.txt
    """
    result = trace_result(source, destination, given, lab, probe=probe)
    show(result, output, every=every, color=color)
    if result.parts:
        raise SystemExit(1)
    if result.unknown:
        raise SystemExit(NOT_KNOWN)


def trace_result(
    source: str, destination: str, given: dict[str, Any], lab: str | None = None, *, probe: bool = False
) -> TraceResult:
    """Trace a packet as the command does; `given` are the values of its other options. Raises ClickException."""
    given["live"] = given["live"] or given["netns"] is not None
    source, destination = _asked(source, destination, given)
    objects = _check_sources(given, lab, probe=probe)
    request = TraceRequest(
        source=source,
        destination=destination,
        node=str(given["node"]),
        iif=given["iif"] or "",
        source_port=given["source_port"] or 0,
        size=given["size"],
        domain=given["domain"],
    )
    try:
        return _traced(request, given, lab, objects=objects, probe=probe)
    except InputError as error:
        raise click.ClickException(str(error)) from error


def _asked(source: str, destination: str, given: dict[str, Any]) -> tuple[str, str]:
    """Return SRC and DST, if they are missing those of an issue text; its options complete those in `given`.

    An issue text among --rules counts as a bundle. Raises UsageError if nothing names SRC and DST.
    """
    from narthex.trace.program.issue_files import first_issue, read_issue

    try:
        texts = tuple(path for path in given["dumps"] if read_issue(path) is not None)
        given["bundles"] = (*given["bundles"], *texts)
        given["dumps"] = tuple(path for path in given["dumps"] if path not in texts)
        issue = first_issue(given["bundles"])
    except InputError as error:
        raise click.ClickException(str(error)) from error
    if source and destination:
        return source, destination
    if source or issue is None:
        missing = "'DST[:PORT][/PROTO]'" if source else "'SRC'"
        hint = "A text of `narthex bundle --for-issue` names SRC and DST: --bundle FILE."
        if given["bundles"] and issue is None:
            files = ", ".join(visible(str(path)) for path in given["bundles"])
            hint = f"No text of `narthex bundle --for-issue`, which would name SRC and DST, is in {files}."
        raise click.MissingParameter(hint, param_hint=missing, param_type="argument")
    asked = issue.question
    given["node"] = given["node"] or asked.node
    given["iif"] = given["iif"] or asked.iif
    given["source_port"] = given["source_port"] or asked.source_port
    given["size"] = given["size"] or asked.size
    given["node_ips"] = given["node_ips"] or asked.node_ips
    if given["domain"] == CLUSTER_DOMAIN:
        given["domain"] = asked.domain or CLUSTER_DOMAIN
    return asked.source, asked.destination


def _check_sources(given: dict[str, Any], lab: str | None, *, probe: bool) -> bool:
    """Return True if objects are given. Raises UsageError for sources that are missing or contradict each other."""
    objects = has_source(given)
    bundles, dumps, live = given["bundles"], given["dumps"], given["live"]
    if not (objects or lab is not None or bundles or live or dumps):
        raise click.UsageError(
            "say where to look: --bundle FILE, --rules FILE, --live, --manifests DIR, --kubeconfig FILE, --master URL or "
            "--lab NAME"
        )
    if lab is not None and (objects or dumps or bundles or live):
        raise click.UsageError(
            "a lab has its live rules and objects: leave out --rules, --bundle, --live and --manifests"
        )
    if probe and not (live or lab is not None):
        raise click.UsageError("--probe sends a packet, and needs --live or --lab NAME")
    return objects


def _traced(
    request: TraceRequest, options: dict[str, Any], lab: str | None, *, objects: bool, probe: bool
) -> TraceResult:
    """Trace the packet by the sources that the options name."""
    followed = options["dumps"] and (not objects or _follows_routes(options["dumps"]))
    if options["bundles"] or options["live"] or followed:
        return _over_nodes(options, request, probe=probe)
    if lab is not None:
        with working(f"tracing in lab {lab}"):
            return _in_lab(lab, request, probe=probe)
    return _by_objects(request, options)


def _over_nodes(options: dict[str, Any], request: TraceRequest, *, probe: bool) -> TraceResult:
    """Follow the packet over nodes, by what their tools printed or print now."""
    views, cluster = views_of(options, default_live=False)
    for problem in cluster.problems if cluster is not None else ():
        click.echo(str(problem), err=True)
    known = KnownCluster(
        views=views,
        snapshot=cluster.snapshot if cluster is not None else Snapshot(),
        has_objects=cluster is not None,
        others=OUTSIDE_NAMES,
        node_ips=tuple(map(address, options["node_ips"])),
    )
    with working("following the packet"):
        path = travel_live(known, request, options["netns"]) if options["live"] else travel(known, request)
    tried = None
    if probe:
        from narthex.trace.program.kernel_probe import send, sender_of

        namespace = options["netns"]
        tried = send(path, sender=sender_of(path.packet.source, namespace), node=namespace)
    return TraceResult(path=path, findings=_findings(path, known), tried=tried)


def _in_lab(name: str, request: TraceRequest, *, probe: bool) -> TraceResult:
    """Follow the packet through the lab, and compare the live rules with the plan."""
    from narthex.lab.program.trace import namespace_of, trace_lab
    from narthex.trace.program.kernel_probe import send

    traced = trace_lab(name, request)
    tried = None
    if probe:
        sender = namespace_of(name, traced.path.packet.source)
        tried = send(traced.path, sender=sender, node=namespace_of(name, traced.node), node_name=traced.node)
    return TraceResult(path=traced.path, findings=traced.findings, tried=tried)


def _by_objects(request: TraceRequest, options: dict[str, Any]) -> TraceResult:
    """Walk the rules that the objects become on one node, or those of dumps, and compare them with the plan."""
    cluster = cluster_of(options, pods=True)
    chosen = node_options_of(options)
    inputs = viewed(cluster, chosen) if chosen.node else None
    traced = trace_by_objects(
        cluster.snapshot if inputs is None else inputs.snapshot,
        request.source,
        request.destination,
        lambda node: inputs or viewed(cluster, msgspec.structs.replace(chosen, node=node)),
        domain=request.domain,
        iif=options["iif"],
        dump=_rules_of(texts_of(options["dumps"])) if options["dumps"] else None,
    )
    return TraceResult(path=traced.path, findings=traced.findings)


def _rules_of(read: tuple[list[tuple[str, str]], list[str]]) -> Callable[[IPFamily], WalkInput] | None:
    """Return the rules of files by family. What cannot be used is named on stderr and does not end the command."""
    texts, unused = read
    problems = dict.fromkeys(unused)

    def rules(family: IPFamily) -> WalkInput:
        """Return the rules of one address family and print the problems of the dump.

        Raise `DumpError` if it holds no rules.
        """
        dump = merge_dumps(read_dump(text, name, family) for name, text in texts)
        said = dict.fromkeys((*problems, *map(str, dump.problems)))
        if not (dump.tables or dump.sets or dump.servers):
            raise DumpError("; ".join(said))
        for problem in said:
            click.echo(problem, err=True)
        return dump.for_family(family)

    return rules if texts else None


def _follows_routes(paths: Sequence[Path]) -> bool:
    """Return True if files have more than rules: what is known of routes and links is then followed."""
    try:
        view = from_files(paths, "")
    except DumpError:
        return False
    fields = ("routes", "links", "addresses", "policies", "neighbours", "fdb", "connections", "sysctls", "listeners")
    return any(getattr(view, field) is not None for field in fields)


class TraceResult(TracedPath, frozen=True, kw_only=True):
    """A path, the causes of its failure, and the result of a probe."""

    tried: ProbeComparison | None = None

    @property
    def parts(self) -> bool:
        """True if the kernel treated the probe differently than predicted."""
        return self.tried is not None and not self.tried.alignment.agrees

    @property
    def unknown(self) -> bool:
        """True if the input does not decide where the packet ends, at least for some connections."""
        return any(end.fate is Fate.UNKNOWN for end in branch_ends(self.path.tree))


def _findings(path: PacketPath, known: KnownCluster) -> list[CauseFinding]:
    """Return the causes of a failure, by everything that is known of nodes and objects."""
    from narthex.trace.causes.find import find

    return find(path, {view.name: view for view in known.views}, known.snapshot if known.has_objects else None)


def show(result: TraceResult, format: str, *, every: bool = False, color: str = "auto") -> None:
    """Print a result; `every` adds details to the text."""
    if format in PICTURES:
        click.echo(picture(format)(result.path, result.findings), nl=False)
        return
    probe, probed = _probed(result.tried)
    if format == "json":
        click.echo(json_text(trace_document(result.path, result.findings, probe)), nl=False)
        return
    said = lines(result.path, result.findings, every=every, width=line_width())
    kernel = ["", *probed.splitlines()] if probed else []
    print_lines([*said, *((Span(line),) for line in kernel)], color)


def _probed(tried: ProbeComparison | None) -> tuple[ProbeRecord | None, str]:
    """Return what a probe showed, as part of the document and as text."""
    if tried is None:
        return None, ""
    from narthex.trace.program.kernel_probe import probe_record, probe_text

    return probe_record(tried), probe_text(tried)


def picture(format: str) -> Callable[[PacketPath, Sequence[CauseFinding]], str]:
    """Return the function that draws a path and its findings in one of PICTURES."""
    from narthex.trace.render.drawing import draw

    if format == "html":
        from narthex.trace.render.html import page

        return page
    if format == "svg":
        from narthex.trace.render.svg import svg

        return lambda path, findings: svg(draw(path), findings)
    from narthex.trace.render.graph import dot, mermaid

    made = dot if format == "dot" else mermaid
    return lambda path, _: made(draw(path))
