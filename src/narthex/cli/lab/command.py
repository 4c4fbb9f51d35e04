"""`narthex lab`: a cluster network on this machine, made of network namespaces."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from narthex.cli.lab import output as lab_output
from narthex.cli.lab.faults import fault
from narthex.cli.lab.history import record, replay
from narthex.cli.ui import port_option, show
from narthex.lab.program import exec as inside
from narthex.lab.program import labs
from narthex.lab.program.state import LabError

OVERLAYS = ("none", "vxlan", "host-gw")
MODES = ("nftables", "iptables", "ipvs", "userspace")


def _name(function: Callable[..., None]) -> Callable[..., None]:
    return click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="Which lab.")(function)


def _output(function: Callable[..., None]) -> Callable[..., None]:
    choice = click.Choice(["text", "json"])
    return click.option("-o", "--output", type=choice, default="text", help="Form of the output.")(function)


def _plain_errors(function: Callable[..., None]) -> Callable[..., None]:
    """A LabError is a message for people, not a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except LabError as error:
            raise click.ClickException(str(error)) from None

    return wrapped


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


@click.group()
def command() -> None:
    """A cluster network on this machine: nodes, pods and an outside client, each a network namespace.

    Every node runs the same node proxy that a real node would, over the manifests you give. Needs root.
    """


@command.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--nodes", default=2, show_default=True, type=click.IntRange(min=1), help="How many nodes.")
@click.option(
    "--mode", default="nftables", show_default=True, type=click.Choice(MODES), help="How the proxies program."
)
@click.option(
    "--overlay",
    default="none",
    show_default=True,
    type=click.Choice(OVERLAYS),
    help="How pods of other nodes are reached; none: by plain routes, as in a cloud's network.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="CIDR",
    help="Addresses for Services of type LoadBalancer (192.168.15.0/28, or FIRST-LAST); repeatable. IPAddressPools among "
    "the manifests count, too.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep what the API holds: the next lab of this name goes on with it, until `lab down --forget`.",
)
@_name
@_output
@_plain_errors
def up(
    directory: Path | None,
    nodes: int,
    mode: str,
    overlay: str,
    pools: tuple[str, ...],
    keep: bool,
    name: str,
    output: str,
) -> None:
    """Bring a lab up over the manifests in DIRECTORY, which it follows from then on: edits take effect at once.

    Deployments and Pods become pods with a server on each containerPort; Services get addresses and endpoints.
    Without DIRECTORY the lab makes an empty one and says where. With a pool, the nodes answer for load balancers' addresses,
    and `outside` reaches them.
    """
    started = labs.up(name, directory, nodes, mode, overlay, pools, keep=keep)
    if output == "json":
        _print_json({**labs.to_builtins(started.state), "seconds": round(started.seconds, 3)})
    else:
        click.echo(lab_output.started(started))


@command.command()
@_name
@_output
@_plain_errors
def status(name: str, output: str) -> None:
    """Show nodes, proxies, pods and Services. Exit status 1 when something of it does not work."""
    found = labs.inspect_lab(name)
    if output == "json":
        _print_json(found)
    else:
        click.echo(lab_output.status(found))
    if not found.healthy:
        raise SystemExit(1)


@command.command(name="list")
@_output
@_plain_errors
def list_labs(output: str) -> None:
    """Show which labs there are."""
    found = labs.inspect_all()
    if output == "json":
        _print_json(found)
    else:
        click.echo(lab_output.labs(found))


@command.command(name="exec", context_settings={"ignore_unknown_options": True})
@_name
@click.option("-c", "--container", default="", help="Which container of a pod; else the first.")
@click.argument("target")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@_plain_errors
def exec_(name: str, container: str, target: str, argv: tuple[str, ...]) -> NoReturn:
    """Run COMMAND in TARGET: a node, a pod (NAME or NAMESPACE/NAME) or `outside`.

    On a node and `outside` only the network is another one. In a pod a command also sees its host name, /etc/hosts,
    /etc/resolv.conf, /tmp and processes; other files and programs are this machine's.
    """
    state = labs.read(name)
    inside.run(state, inside.find_target(state, target), argv, container)


@command.command()
@_name
@_plain_errors
def env(name: str) -> None:
    """Print what makes kubectl and other clients speak with the lab: eval "$(narthex lab env)"."""
    click.echo(f"export KUBECONFIG={shlex.quote(str(labs.open_lab(name).kubeconfig))}")


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@_plain_errors
def kubectl(name: str, argv: tuple[str, ...]) -> NoReturn:
    """Run this machine's kubectl against the lab: narthex lab kubectl get pods -o wide."""
    environment = {**os.environ, "KUBECONFIG": str(labs.open_lab(name).kubeconfig)}
    try:
        os.execvpe("kubectl", ["kubectl", *argv], environment)
    except FileNotFoundError:
        raise LabError("this machine has no kubectl: install the package kubernetes-client") from None


@command.command()
@click.argument("target", metavar="deployment/NAME")
@click.argument("replicas", type=click.IntRange(min=0))
@click.option("-n", "--namespace", default="default", show_default=True, help="The Deployment's namespace.")
@_name
@_output
@_plain_errors
def scale(target: str, replicas: int, namespace: str, name: str, output: str) -> None:
    """Give a Deployment another number of pods, without touching your manifests.

    Returns when the pods are there and every proxy knows. It holds until the manifest itself asks for another number.
    """
    kind, slash, deployment = target.partition("/")
    if not slash or kind not in ("deployment", "deployments", "deploy", "deployment.apps"):
        raise click.UsageError(f"{target!r} is not deployment/NAME")
    state = labs.scale(name, namespace, deployment, replicas)
    if output == "json":
        _print_json(labs.to_builtins(state))
    else:
        click.echo(f"Deployment {namespace}/{deployment} has {replicas} replicas now:\n")
        click.echo(lab_output.pods(state))


@command.command()
@click.argument("node")
@_name
@_output
@_plain_errors
def kill(node: str, name: str, output: str) -> None:
    """Let NODE die: its process is killed and its cable goes dead, both without a word to the others.

    Returns at once. Load balancers' addresses move to other nodes within a second; after 2 seconds (Kubernetes takes 40)
    the cluster counts the node and its pods as not ready. A dead node stays dead until `lab down`.
    """
    state = labs.kill(name, node)
    if output == "json":
        _print_json(labs.to_builtins(state))
    else:
        click.echo(f"{node} is dead: its process is killed and its cable is cut.")


@command.command()
@_name
@_output
@_plain_errors
def wait(name: str, output: str) -> None:
    """Wait until the manifests as they are now have reached every proxy. For scripts that edit and then call."""
    state = labs.settle(name)
    if output == "json":
        _print_json(labs.to_builtins(state))
    else:
        click.echo(lab_output.problems(state) or "Everything is in force.")


@command.command()
@port_option
@_name
@_plain_errors
def ui(name: str, port: int) -> None:
    """Show the lab as a picture in a browser: nodes, pods, Services, live connection counts, and the way of a packet.

    The page is for this machine alone: it listens on 127.0.0.1 and asks for the token in the address that is printed.
    """
    from narthex.lab.program.ui import board_of

    show(*board_of(name), port)


@command.command()
@_name
@click.option("--all", "all_labs", is_flag=True, help="Every lab on this machine.")
@click.option("--forget", is_flag=True, help="Also what was kept by `lab up --keep`.")
@_output
@_plain_errors
def down(name: str, all_labs: bool, forget: bool, output: str) -> None:
    """Take a lab away with everything in it, also what a crash has left."""
    names = sorted({*labs.all_names(), *(labs.kept_names() if forget else ())}) if all_labs else [name]
    done = [{"name": each, "removed": labs.down(each, forget=forget)} for each in names]
    if output == "json":
        _print_json(done)
        return
    for each in done:
        gone = f"Lab {each['name']} is gone." if each["removed"] else f"There is no lab {each['name']}."
        rest = " What its API held is kept for the next one." if labs.is_kept(str(each["name"])) else ""
        click.echo(gone + rest)
    if not done:
        click.echo("There is no lab.")


command.add_command(fault)
command.add_command(record)
command.add_command(replay)
