"""The command line: arguments and output only. Each command lives in a module of its own, loaded when it is called."""

from __future__ import annotations

import importlib

import click

import narthex

_COMMANDS = {
    "bundle": ("narthex.cli.bundle", "Take all that a node can tell of a packet's way, in one file."),
    "check": ("narthex.cli.check", "Compare the cluster's objects with what a node's kernel does."),
    "cleanup": ("narthex.cli.cleanup", "Remove all rules that Narthex or kube-proxy left here."),
    "cni": ("narthex.cli.cni", "The CNI plugins: put them in place, and run their agent."),
    "diff": ("narthex.cli.diff", "Tell in what two bundles, or two modes, differ."),
    "dns": ("narthex.cli.dns", "Be the cluster's DNS server."),
    "lab": ("narthex.cli.lab.command", "A cluster network on this machine, made of network namespaces."),
    "lb": ("narthex.cli.lb", "Addresses for Services of type LoadBalancer."),
    "migrate": ("narthex.cli.migrate", "Show what a change of mode would change, and why."),
    "node": ("narthex.cli.node", "Be all that a node needs, in one process."),
    "overlay": ("narthex.cli.overlay", "Let pods reach the pods of other nodes, as flannel does."),
    "plan": ("narthex.cli.plan", "Show what must happen to every packet: the decided plan."),
    "proxy": ("narthex.cli.proxy.command", "Be the node proxy: program this network namespace until stopped."),
    "render": ("narthex.cli.render", "Print the rules that a plan becomes in a mode."),
    "scenario": ("narthex.cli.scenario", "Check packet-flow scenarios against plan, rules and kernel."),
    "top": ("narthex.cli.top", "Show new connections of Services and endpoints, as the kernel counts them."),
    "trace": ("narthex.cli.trace", "Explain a packet's way through Services, step by step."),
    "ui": ("narthex.cli.ui", "Show a cluster as a picture in a browser."),
}


_EXTRAS = {
    "dns": ("dnspython", "dns"),
    "google": ("protobuf", "lab"),
    "jsonpatch": ("jsonpatch", "lab"),
    "rich": ("rich", "ui"),
    "wsproto": ("wsproto", "lab"),
}
"""Modules that a plain installation lacks: the package that has each one, and the extra that installs it."""


class _LazyGroup(click.Group):
    """Imports a command's module only when it is needed, so that `narthex --help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; name the extra to install if an optional package is missing."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            missing = _EXTRAS.get((error.name or "").partition(".")[0])
            if missing is None:
                raise
            package, extra = missing
            raise click.ClickException(
                f"this needs the Python package {package}, which is not installed: pip install 'narthex[{extra}]'"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in sorted(_COMMANDS)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(narthex.__version__, prog_name="narthex")
def main() -> None:
    """The Kubernetes Service network: plan it, program it, explain it."""
