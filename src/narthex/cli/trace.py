"""`narthex trace`: one packet's way, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from narthex.apps.inputs import InputError, Inputs
from narthex.apps.places import OUTSIDE, Places, TraceError
from narthex.apps.trace import CLUSTER_DOMAIN, Question, answer, ask, question
from narthex.cli.inputs import cluster_of, has_source, options, output_option, source_options, viewed, wishes_of
from narthex.netfilter.dump import DumpError, read_all
from narthex.trace.explain import Explanation, as_data
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
@click.option(
    "--rules",
    "dumps",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What a tool of the node printed (iptables-save, nft list ruleset, ipset save, ipvsadm -S -n), instead of "
    "the rules that --manifests become; repeatable.",
)
@click.option(
    "--cluster-domain",
    "domain",
    default=CLUSTER_DOMAIN,
    show_default=True,
    metavar="ZONE",
    help="What the names in the cluster's DNS end in, where DST is a name.",
)
@click.option("--iif", metavar="NAME", help="The interface that the packet comes in on. Default: one that fits SRC.")
@output_option
def command(
    source: str,
    destination: str,
    lab: str | None,
    dumps: tuple[Path, ...],
    domain: str,
    iif: str | None,
    output: str,
    **given: Any,
) -> None:
    """Explain the way of the first packet of a new connection from SRC to DST, step by step.

    SRC is an address, a pod (pod/NAMESPACE/NAME or NAMESPACE/NAME), a node, or `outside`. DST is one of these, a
    Service, or from a pod a name with a dot, for the cluster's DNS; without PORT it is the Service's only one. PROTO is
    tcp, udp, sctp or icmp.

    \b
        narthex trace shop/client shop/web --manifests DIR --node worker-a
        narthex trace shop/client web.shop:80 --manifests DIR
        narthex trace outside worker-a:30001 --manifests DIR
        narthex trace outside shop/web --manifests DIR --mode ipvs --rules iptables.txt --rules ipset.txt --rules ipvs.txt
    """
    if has_source(given) is (lab is not None):
        raise click.UsageError("say where to look: --manifests DIR, --kubeconfig FILE, --master URL or --lab NAME")
    if dumps and lab is not None:
        raise click.UsageError("a lab has its live rules: leave out --rules")
    try:
        if lab is not None:
            from narthex.apps.lab.trace import trace_lab

            explanation = trace_lab(lab, source, destination, str(given["node"]), iif)
        else:
            explanation = _from_objects(source, destination, domain, iif, dumps, given)
    except (TraceError, InputError, DumpError) as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(as_data(explanation))))
    else:
        click.echo(text(explanation), nl=False)


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
