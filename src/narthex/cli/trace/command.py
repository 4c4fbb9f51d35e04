"""`narthex trace`: one packet's way, explained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from narthex.cli.inputs import cluster_of, has_source, options, source_options, viewed, wishes_of
from narthex.cli.sources import node_options, views_of
from narthex.cli.trace.output import DRAWN, Shown, findings_of, output_option, show, show_explanation
from narthex.model.net import address
from narthex.model.store import Snapshot
from narthex.netfilter.dump.read import DumpError, read_all
from narthex.proxy.program.inputs import InputError, Inputs
from narthex.trace.explain import Explanation
from narthex.trace.model import PacketPath
from narthex.trace.names import Named
from narthex.trace.program.bundle_reading import BundleError
from narthex.trace.program.known import Known
from narthex.trace.program.places import OUTSIDE, Places, TraceError
from narthex.trace.program.rules_trace import CLUSTER_DOMAIN, Question, answer, ask, question
from narthex.trace.program.travel import Wish, travel

if TYPE_CHECKING:
    from narthex.trace.program.probing import Tried


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST[:PORT][/PROTO]")
@source_options
@click.option(
    "--lab", metavar="NAME", help="A running lab, with its live rules and routes, instead of a cluster's objects."
)
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
@click.option("--all", "every", is_flag=True, help="Also rules that only led to others, and those that nearly matched.")
@output_option
def command(
    source: str,
    destination: str,
    lab: str | None,
    domain: str,
    iif: str | None,
    source_port: int | None,
    size: int,
    probe: bool,
    every: bool,
    output: str,
    **given: Any,
) -> None:
    """Explain the way of the first packet of a new connection from SRC to DST, step by step.

    SRC is an address, a pod (pod/NAMESPACE/NAME or NAMESPACE/NAME), a node, or `outside`. DST is one of these, a
    Service, or from a pod a name with a dot, for the cluster's DNS; without PORT it is the Service's only one. PROTO is
    tcp, udp, sctp or icmp.

    Without a bundle, --live or --lab the rules are those that the objects become, or those of --rules. With them the packet
    is followed over links, routes and nodes, and --manifests or --kubeconfig give the names.

    \b
        narthex trace outside 192.168.49.11:30001 --bundle node-1.tgz --bundle node-2.tgz
        narthex trace 10.244.1.7 10.96.0.10:53/udp --rules iptables-save.txt --rules ip-route.txt
        narthex trace 10.244.1.7 10.96.0.10:53/udp --live --probe
        narthex trace shop/client shop/web --manifests DIR --node worker-a
        narthex trace shop/client web.shop:80 --manifests DIR
        narthex trace outside worker-a:30001 --manifests DIR
        narthex trace outside shop/web --manifests DIR --mode ipvs --rules iptables.txt --rules ipset.txt --rules ipvs.txt
    """
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
    wish = Wish(
        source=source,
        destination=destination,
        node=str(given["node"]),
        iif=iif or "",
        source_port=source_port or 0,
        size=size,
        domain=domain,
    )
    if probe and not (live or lab is not None):
        raise click.UsageError("--probe sends a packet, and needs --live or --lab NAME")
    try:
        if bundles or live or (dumps and not objects):
            known = _known(given)
            journey = travel(known, wish)
            tried = _probe_live(journey, given["netns"]) if probe else None
            shown = Shown(findings=findings_of(journey, known), tried=tried)
            show(journey, shown, output, every=every)
        elif lab is not None:
            shown = _in_lab(lab, wish, output, probe=probe, every=every)
        elif output in DRAWN:
            raise click.UsageError(f"-o {output} draws what nodes really have: give --live, --bundle or --lab")
        else:
            shown = Shown()
            show_explanation(_from_objects(source, destination, domain, iif, dumps, given), shown, output)
    except (TraceError, InputError, DumpError, BundleError) as error:
        raise click.ClickException(str(error)) from error
    if shown.parts:
        raise SystemExit(1)


def _probe_live(journey: PacketPath, namespace: str | None) -> Tried:
    from narthex.trace.program.probing import send, sender_of

    return send(journey, sender=sender_of(journey.packet.source, namespace), node=namespace)


def _in_lab(name: str, wish: Wish, output: str, *, probe: bool, every: bool) -> Shown:
    """The plan and the live rules, the journey beside them, and what may be wrong with it."""
    from narthex.lab.program.known import known_of, look_into_pods, namespace_of
    from narthex.lab.program.trace import trace_lab
    from narthex.trace.program.probing import send

    explanation = trace_lab(name, wish.source, wish.destination, wish.node, wish.iif or None)
    known = known_of(name)
    journey = travel(known, msgspec.structs.replace(wish, node=explanation.node))
    look_into_pods(name, known, journey)
    tried = None
    if probe:
        sender = namespace_of(name, journey.packet.source)
        tried = send(journey, sender=sender, node=namespace_of(name, explanation.node), node_name=explanation.node)
    shown = Shown(findings=findings_of(journey, known), tried=tried)
    if output in DRAWN:
        show(journey, shown, output)
    else:
        show_explanation(explanation, shown, output, journey, every=every)
    return shown


def _known(options: dict[str, Any]) -> Known:
    """Nodes and objects, of all sources that were named."""
    views, cluster = views_of(options, default_live=False)
    for problem in cluster.problems if cluster is not None else ():
        click.echo(str(problem), err=True)
    return Known(
        views=views,
        snapshot=cluster.snapshot if cluster is not None else Snapshot(),
        has_objects=cluster is not None,
        others={ip: Named("outside", "") for ip in OUTSIDE},
        node_ips=tuple(map(address, options["node_ips"])),
    )


def _from_objects(
    source: str,
    destination: str,
    domain: str,
    iif: str | None,
    dumps: tuple[Path, ...],
    options: dict[str, Any],
) -> Explanation:
    cluster = cluster_of(options, pods=True)
    wishes = wishes_of(options)
    places = Places(cluster.snapshot)
    sender, target, wanted = ask(places, source, destination, domain)
    if not wishes.node:
        wishes = msgspec.structs.replace(wishes, node=sender.node or target.node)
    inputs: Inputs = viewed(cluster, wishes)
    asked: Question = question(places, sender, target, wanted, inputs, inputs.host, iif)
    # What a tool printed may hold bytes that are no text, in a comment for instance.
    texts = [(str(path), path.read_text(errors="replace")) for path in dumps]
    return answer(
        asked,
        inputs,
        inputs.host,
        others={ip: Named("outside", "") for ip in OUTSIDE},
        dump=(lambda family: read_all(texts, family).of(family)) if texts else None,
    )
