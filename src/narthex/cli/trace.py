"""`narthex trace`: one packet's way, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from narthex.apps.inputs import InputError, Inputs
from narthex.apps.path.known import Known
from narthex.apps.path.travel import Wish, travel
from narthex.apps.places import OUTSIDE, Places, TraceError
from narthex.apps.trace import CLUSTER_DOMAIN, Question, answer, ask, question
from narthex.cli.inputs import cluster_of, has_source, options, source_options, viewed, wishes_of
from narthex.cli.sources import node_options, views_of
from narthex.cli.trace_output import DRAWN, findings_of, output_option, show
from narthex.model.net import address
from narthex.netfilter.dump import DumpError, read_all
from narthex.sources.node.tar import BundleError
from narthex.state.store import Snapshot
from narthex.trace.causes import told
from narthex.trace.causes.finding import Finding
from narthex.trace.explain import Explanation, as_data
from narthex.trace.journey import Journey
from narthex.trace.journey import as_data as journey_data
from narthex.trace.journey_text import text as journey_text
from narthex.trace.names import Named
from narthex.trace.tree import text


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
    findings: list[Finding] = []
    journey: Journey | None = None
    try:
        if bundles or live or (dumps and not objects):
            known = _known(given)
            journey = travel(known, wish)
            show(journey, findings_of(journey, known), output, every=every)
            return
        if lab is not None:
            from narthex.apps.lab.known import known_of, look_into_pods
            from narthex.apps.lab.trace import trace_lab

            explanation = trace_lab(lab, source, destination, str(given["node"]), iif)
            known = known_of(lab)
            journey = travel(known, msgspec.structs.replace(wish, node=explanation.node))
            look_into_pods(lab, known, journey)
            findings = findings_of(journey, known)
            if output in DRAWN:
                show(journey, findings, output)
                return
        elif output in DRAWN:
            raise click.UsageError(f"-o {output} draws what nodes really have: give --live, --bundle or --lab")
        else:
            explanation = _from_objects(source, destination, domain, iif, dumps, given)
    except (TraceError, InputError, DumpError, BundleError) as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        data = as_data(explanation)
        if journey is not None:
            data |= {"findings": told.as_data(findings), "journey": journey_data(journey)}
        click.echo(msgspec.json.format(msgspec.json.encode(data)))
    else:
        if journey is not None and every:
            click.echo(journey_text(journey, every=True))
        click.echo(text(explanation), nl=False)
        click.echo(told.text(findings), nl=False)


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
