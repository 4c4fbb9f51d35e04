"""`narthex lb`: addresses for Services of type LoadBalancer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from narthex.cli.inputs import NO_SOURCE, has_source, kubeconfig_of_lab, source_options
from narthex.cli.options import lab_option, output_option, require_followed_source, with_options
from narthex.cli.output import print_document, reported_errors, working

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@click.group("lb")
def command() -> None:
    """Allocate addresses for Services of type LoadBalancer, and show how pools are used."""


_source_of_pools = with_options(
    source_options,
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A LoadBalancerConfiguration; its pools are used instead of IPAddressPools.",
    ),
)
_looking = with_options(
    _source_of_pools,
    click.option("--lb-class", default="", metavar="NAME", help="Serve Services with this spec.loadBalancerClass."),
    click.option("--cluster-cidr", default="", metavar="CIDR[,CIDR]", help="Pod networks that no pool may overlap."),
)


@command.command("controller")
@_looking
@click.option("--address", default="0.0.0.0", metavar="IP", help="Address of the status ports.", show_default=True)
@click.option(
    "--healthz-port", type=click.IntRange(0, 65535), default=10260, help="Port of /healthz.", show_default=True
)
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), default=10261, help="Port of /metrics.", show_default=True
)
@click.option(
    "--lease-namespace", default="", metavar="NAME", help="Namespace of the Lease. Default: the Pod's, or kube-system."
)
@click.option(
    "--lease-name",
    default="",
    metavar="NAME",
    help="Name of the Lease. Default: narthex-lb-controller, with the class if any.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(1.0, 600.0),
    default=15.0,
    help="Lease duration: another controller takes over after this long without a renewal.",
    show_default=True,
)
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@output_option
def controller(
    config: Path | None,
    lb_class: str,
    cluster_cidr: str,
    address: str,
    healthz_port: int,
    metrics_port: int,
    lease_namespace: str,
    lease_name: str,
    lease_seconds: float,
    verbose: bool,
    output: str,
    **where: Any,
) -> None:
    """Allocate addresses. With --manifests: only print what would be done.

    Several controllers may run; the holder of the Lease writes. If it stops, another one takes over, and assigned addresses
    do not change.
    """
    if where["manifests"] is not None:
        has_source(where)
        _show_plan(_inspected(config, lb_class, cluster_cidr, where), output)
        return
    from narthex.kube.leader_election import LeaseTimes
    from narthex.lb.program.controller import CONTROLLER, ControllerOptions, LoadBalancerSettings, serve
    from narthex.runtime.configuration.values import LoggingConfiguration
    from narthex.runtime.logs import DEBUG_VERBOSITY, start_logging

    require_followed_source(where["kubeconfig"] or "", has_source(where))
    start_logging(sys.stderr, LoggingConfiguration(verbosity=DEBUG_VERBOSITY if verbose else 0))
    place = ControllerOptions(
        address=address,
        healthz_port=healthz_port,
        metrics_port=metrics_port,
        lease_namespace=lease_namespace or _own_namespace(),
        times=LeaseTimes(lease=lease_seconds, renew=lease_seconds * 2 / 3, retry=lease_seconds * 2 / 15),
        lease_name=lease_name or "-".join(filter(None, (CONTROLLER, _plain(lb_class)))),
    )
    settings = LoadBalancerSettings(load_balancer_class=lb_class, config=config, cluster_cidrs=_cidrs(cluster_cidr))
    with reported_errors():
        serve(_access(where, quick=True), settings, place)


@command.command("pools")
@_looking
@lab_option
@output_option
def pools(config: Path | None, lb_class: str, cluster_cidr: str, lab: str | None, output: str, **where: Any) -> None:
    """List the pools with their total and used addresses, and why a pool is refused."""
    if lab is not None:
        _refuse_other_sources(config, where)
        where["kubeconfig"] = kubeconfig_of_lab(lab)
    if not has_source(where) and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise click.UsageError(NO_SOURCE)
    found = _inspected(config, lb_class, cluster_cidr, where)
    width = max((len(use.name) for use in found.uses), default=0)
    lines = [f"{use.name:{width}}  {_pool_text(use)}\n" for use in found.uses]
    none = "no pools; create an IPAddressPool, or use --config\n"
    print_document(found.uses, output, lambda: "".join(lines) or none)


def _pool_text(use: Any) -> str:
    if use.refused:
        return f"refused: {use.refused}"
    details = [f"{use.in_use} of {use.total} in use"]
    details += [] if use.auto_assign else ["only on request"]
    ads = ", ".join(use.advertisements)
    details.append(f"announced by {ads}" if ads else "announced by all nodes, since no advertisement selects it")
    return f"{', '.join(use.addresses)}: {'; '.join(details)}"


@command.command("why")
@click.argument("service", metavar="[NAMESPACE/]SERVICE")
@_source_of_pools
@click.option(
    "--status-port",
    type=click.IntRange(0, 65535),
    default=10256,
    help="Port for querying the nodes' announcers (healthzBindAddress); 0: do not query.",
    show_default=True,
)
@lab_option
@output_option
def why(service: str, config: Path | None, status_port: int, lab: str | None, output: str, **where: Any) -> None:
    """Explain for each address of a Service and each node why the node announces it, or does not.

    The reasons follow from the objects. If an announcer's status port is reachable, directly or through the API server's proxy of
    nodes, its own state is added: the link, the last request, and other hosts that answer.
    """
    if lab is not None:
        _refuse_other_sources(config, where)
    if lab is None and not has_source(where) and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise click.UsageError("no source given: use --manifests DIR, --kubeconfig FILE, --master URL or --lab NAME")
    from narthex.lb.program.inspection import why_service
    from narthex.lb.why import lines
    from narthex.runtime.logs import printable

    manifests = where["manifests"]
    with reported_errors():
        if lab is not None:
            from narthex.lab.program.announcers import why_lab

            with working(f"asking the announcers of lab {lab}"):
                explanation = why_lab(lab, service)
        else:
            access = None if manifests is not None else _access(where, quick=True)
            with working("reading objects and asking announcers"):
                explanation = why_service(
                    service, manifests=manifests, access=access, config=config, status_port=status_port
                )
    print_document(explanation, output, lambda: "".join(f"{printable(line)}\n" for line in lines(explanation)))


def _refuse_other_sources(config: Path | None, where: dict[str, Any]) -> None:
    if config is not None or has_source(where):
        raise click.UsageError("a lab has its own objects: omit --manifests, --kubeconfig, --master and --config")


def _inspected(config: Path | None, lb_class: str, cluster_cidr: str, where: dict[str, Any]) -> Any:
    """Inspect the cluster, and print problems to stderr."""
    from narthex.lb.program.inspection import inspect_cluster
    from narthex.runtime.logs import printable

    with reported_errors(), working("reading the objects"):
        found = inspect_cluster(
            manifests=where["manifests"],
            access=None if where["manifests"] is not None else _access(where),
            config=config,
            load_balancer_class=lb_class,
            cluster_cidrs=_cidrs(cluster_cidr),
        )
    for problem in found.problems:
        click.echo(printable(str(problem)), err=True)
    return found


def _show_plan(found: Any, output: str) -> None:
    from narthex.lb.program.inspection import as_data

    print_document(as_data(found), output, lambda: "".join(f"{line}\n" for line in _plan_lines(found)))


def _plan_lines(found: Any) -> Iterator[str]:
    for refused in found.pools.refused:
        yield f"pool {refused.object.name} is refused: {refused.reason}"
    for service, decision, todo in found.planned():
        what = ", ".join(decision.addresses) or "no address"
        where = f" (pool {decision.pool})" if decision.pool else ""
        yield f"{service.key}: {'would have' if todo.status is not None else 'has'} {what}{where}"
        for event in (*todo.events, *todo.standing):
            if event.reason != "IPAllocated":
                yield f"  {event.reason}: {event.text}"
    if not found.decisions:
        yield "no Service of type LoadBalancer for this controller"


def _access(where: dict[str, Any], *, quick: bool = False) -> Any:
    from narthex.kube.access import access_to

    # A controller writes many objects at once, and `why` asks many nodes; 5 requests a second would take a quarter of an hour for 5,000 Services.
    qps, burst = (100.0, 200) if quick else (5.0, 10)
    return access_to(where["kubeconfig"] or "", where["master"], qps=qps, burst=burst)


def _cidrs(text: str) -> tuple[str, ...]:
    from narthex.model import network

    try:
        return tuple(network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--cluster-cidr") from error


def _own_namespace() -> str:
    try:
        return Path(_NAMESPACE_FILE).read_text().strip()
    except OSError:
        return "kube-system"


def _plain(lb_class: str) -> str:
    """Convert a class, which may contain slashes and capitals, into a part of an object name."""
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in lb_class.lower()).strip("-")
