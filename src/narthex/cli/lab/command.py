"""`narthex lab`: a Kubernetes cluster on this machine, made of network namespaces."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from narthex.cli.lab import external_options, name_option, report_lab_errors
from narthex.cli.lab import output as lab_output
from narthex.cli.lab.conformance import conformance
from narthex.cli.lab.faults import fault
from narthex.cli.lab.history import record, replay
from narthex.cli.lab.output import (
    LabDownDocument,
    LabListDocument,
    LabStateDocument,
    LabStatusDocument,
    LabUpDocument,
    RemovedLab,
    as_document,
)
from narthex.cli.options import output_option
from narthex.cli.output import print_document, working
from narthex.cli.ui import port_option, show
from narthex.lab.program import exec, labs
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError, kept

OVERLAYS = ("none", "vxlan", "host-gw")
MODES = ("nftables", "iptables", "ipvs", "userspace")


@click.group()
def command() -> None:
    """Run a Kubernetes cluster on this machine: nodes, pods, and an outside client in network namespaces.

    Each node runs `narthex node` as a real one does, over the manifests that you give. Requires root.
    """


@command.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--nodes", default=2, show_default=True, type=click.IntRange(min=1), help="Number of nodes.")
@click.option("--mode", default="nftables", show_default=True, type=click.Choice(MODES), help="Proxy mode.")
@click.option(
    "--overlay",
    default="none",
    show_default=True,
    type=click.Choice(OVERLAYS),
    help="Network between pods of different nodes; none: static routes, as in a cloud's network.",
)
@click.option(
    "--socket-load-balancing",
    is_flag=True,
    help="Nodes send sockets to endpoints when they connect, in mode nftables; each node gets a control group.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="CIDR",
    help="Addresses for Services of type LoadBalancer (192.168.15.0/28, or FIRST-LAST); repeatable. IPAddressPools "
    "among the manifests are used as well.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="PREFIX=PATH",
    help="What the images whose names begin with PREFIX stand for: a program of this machine, or a directory whose files "
    "lie over the machine's; repeatable. Words after the path are the image's arguments.",
)
@click.option(
    "--keep", is_flag=True, help="Keep the API's objects for the next lab of this name, until `lab down --forget`."
)
@external_options
@name_option
@output_option
@report_lab_errors
def up(
    directory: Path | None,
    nodes: int,
    mode: str,
    overlay: str,
    socket_load_balancing: bool,
    pools: tuple[str, ...],
    images: tuple[str, ...],
    keep: bool,
    name: str,
    output: str,
    **external: Any,
) -> None:
    """Start a lab with the manifests in DIRECTORY, and apply later edits at once.

    Deployments and Pods become pods with a server on each containerPort; Services get addresses and endpoints.
    Without DIRECTORY the lab creates an empty one and prints its path. With a pool, nodes answer for load balancer addresses,
    which `outside` can reach.

    Containers whose image is a program of this machine run it, with a private view of the machine's files. The command names these
    programs before it runs them.
    """
    if directory is not None and directory.exists():
        _announce_programs(directory, images)
    with working(f"starting lab {name}"):
        options = LabOptions(
            source=directory,
            nodes=nodes,
            mode=mode,
            overlay=overlay,
            socket_load_balancing=socket_load_balancing,
            pools=pools,
            images=images,
            **external,
        )
        started = labs.up(name, options, keep=keep, progress=lambda text: click.echo(f"lab {name}: {text}", err=True))
    document = as_document(LabUpDocument, started.state, seconds=round(started.seconds, 3))
    print_document(document, output, lambda: lab_output.started(started) + "\n")


def _announce_programs(directory: Path, images: Sequence[str]) -> None:
    """Say which programs of this machine the manifests run, before they run."""
    from narthex.lab.kubelet.program.images import Images
    from narthex.lab.program.manifests import machine_programs

    try:
        found = machine_programs(directory, Images(images))
    except ValueError as error:
        raise LabError(str(error)) from None
    if found:
        click.echo(
            "These manifests run programs of this machine, as root in namespaces of their own, with a private", err=True
        )
        click.echo("view of its files (docs/reference/lab-pods.md):", err=True)
        click.echo("".join(f"  {line}\n" for line in found), err=True)


@command.command()
@name_option
@output_option
@report_lab_errors
def status(name: str, output: str) -> None:
    """Show nodes, proxies, pods, and Services. Exit status 1 if something is unhealthy."""
    with working(f"reading the state of lab {name}"):
        found = labs.inspect_lab(name)
    print_document(as_document(LabStatusDocument, found), output, lambda: lab_output.status(found) + "\n")
    if not found.healthy:
        raise SystemExit(1)


@command.command(name="list")
@output_option
@report_lab_errors
def list_labs(output: str) -> None:
    """List the labs on this machine."""
    found = labs.inspect_all()
    print_document(LabListDocument(labs=found), output, lambda: lab_output.labs(found) + "\n")


@command.command(name="exec", context_settings={"ignore_unknown_options": True})
@name_option
@click.option("-c", "--container", default="", help="Container of a pod; default: the first.")
@click.argument("target")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@report_lab_errors
def exec_(name: str, container: str, target: str, argv: tuple[str, ...]) -> NoReturn:
    """Run COMMAND in TARGET: a node, a pod (NAME or NAMESPACE/NAME), or `outside`.

    On nodes and `outside` only the network differs from this machine's. In a pod, host name, /etc/hosts,
    /etc/resolv.conf, /tmp, /root, and processes are the pod's; other files and programs are a private view of this
    machine's, and changes are lost.
    """
    state = labs.read(name)
    exec.run(state, exec.find_target(state, target), argv, container)


@command.command()
@name_option
@report_lab_errors
def env(name: str) -> None:
    """Print the environment for kubectl and other clients: eval "$(narthex lab env)"."""
    click.echo(f"export KUBECONFIG={shlex.quote(str(labs.open_lab(name).kubeconfig))}")


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@name_option
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@report_lab_errors
def kubectl(name: str, argv: tuple[str, ...]) -> NoReturn:
    """Run this machine's kubectl with the lab: narthex lab kubectl get pods -o wide."""
    environment = {**os.environ, "KUBECONFIG": str(labs.open_lab(name).kubeconfig)}
    try:
        os.execvpe("kubectl", ["kubectl", *argv], environment)
    except FileNotFoundError:
        raise LabError("the program 'kubectl' is missing; install the package kubernetes-client") from None


@command.command()
@click.argument("target", metavar="deployment/NAME")
@click.argument("replicas", type=click.IntRange(min=0))
@click.option("-n", "--namespace", default="default", show_default=True, help="The Deployment's namespace.")
@name_option
@output_option
@report_lab_errors
def scale(target: str, replicas: int, namespace: str, name: str, output: str) -> None:
    """Scale a Deployment without changing its manifest.

    Returns when the pods run and every proxy has synced. Applies until the number in the manifest itself changes.
    """
    kind, slash, deployment = target.partition("/")
    if not slash or kind not in ("deployment", "deployments", "deploy", "deployment.apps"):
        raise click.UsageError(f"{target!r} is not deployment/NAME")
    with working(f"scaling {namespace}/{deployment}"):
        state = labs.scale(name, namespace, deployment, replicas)
    scaled = f"Deployment {namespace}/{deployment} now has {replicas} replicas:\n\n"
    print_document(as_document(LabStateDocument, state), output, lambda: f"{scaled}{lab_output.pods(state)}\n")


@command.command()
@click.argument("node")
@name_option
@output_option
@report_lab_errors
def kill(node: str, name: str, output: str) -> None:
    """Kill NODE: its process and its network link, without notice to other nodes.

    Returns at once. Load balancer addresses move to other nodes within a second; after 2 seconds (40 in Kubernetes)
    the node and its pods are not ready. A dead node stays dead until `lab down`.
    """
    state = labs.kill(name, node)
    print_document(
        as_document(LabStateDocument, state),
        output,
        lambda: f"{node} is dead: its process is killed and its link is down.\n",
    )


@command.command()
@name_option
@output_option
@report_lab_errors
def wait(name: str, output: str) -> None:
    """Wait until every proxy has synced the current manifests. For scripts that edit manifests."""
    with working("waiting for the proxies"):
        state = labs.settle(name)
    print_document(
        as_document(LabStateDocument, state),
        output,
        lambda: f"{lab_output.problems(state) or 'Everything is in force.'}\n",
    )


@command.command()
@port_option
@name_option
@report_lab_errors
def ui(name: str, port: int) -> None:
    """Show the lab in a browser: nodes, pods, Services, live connection counts, and paths of packets.

    The page listens on 127.0.0.1 and requires the token in the printed URL.
    """
    from narthex.lab.program.ui import board_of

    show(*board_of(name), port)


@command.command()
@name_option
@click.option("--all", "all_labs", is_flag=True, help="All labs on this machine.")
@click.option("--forget", is_flag=True, help="Also delete objects kept by `lab up --keep`.")
@output_option
@report_lab_errors
def down(name: str, all_labs: bool, forget: bool, output: str) -> None:
    """Remove a lab completely, including the remains of a crash."""
    names = sorted({*labs.all_names(), *(kept() if forget else ())}) if all_labs else [name]
    with working(f"removing {', '.join(names) or 'labs'}"):
        done = tuple(RemovedLab(name=each, removed=labs.down(each, forget=forget)) for each in names)
    print_document(LabDownDocument(labs=done), output, lambda: "".join(map(_down_line, done)) or "There is no lab.\n")


def _down_line(result: RemovedLab) -> str:
    text = f"Lab {result.name} is gone." if result.removed else f"There is no lab {result.name}."
    return text + (" Its API objects are kept for the next lab of this name.\n" if result.name in kept() else "\n")


command.add_command(conformance)
command.add_command(fault)
command.add_command(record)
command.add_command(replay)
