"""The command line: arguments and output only. The module of a command is imported when it is called."""

from __future__ import annotations

import importlib

import click

from narthex.cli.version import version_option

_COMMANDS = {
    "bundle": ("narthex.cli.bundle", "Collect everything that a node knows about packet paths in one file."),
    "check": ("narthex.cli.check", "Compare the objects of a cluster with the kernel state of a node."),
    "cleanup": ("narthex.cli.cleanup", "Remove all rules of Narthex and kube-proxy from this network namespace."),
    "cni": ("narthex.cli.cni", "Install the CNI plugins, and run their agent."),
    "diff": ("narthex.cli.diff", "Show the differences between two bundles, or between two modes."),
    "dns": ("narthex.cli.dns", "Run the DNS server of the cluster."),
    "lab": ("narthex.cli.lab.command", "Run a cluster on this machine, in network namespaces."),
    "lb": ("narthex.cli.lb", "Allocate addresses for Services of type LoadBalancer."),
    "mcp": ("narthex.cli.mcp", "Answer the questions of an agent."),
    "migrate": ("narthex.cli.migrate", "Show what a change of the proxy mode would change, and why."),
    "node": ("narthex.cli.node", "Run all components of a node in one process."),
    "overlay": ("narthex.cli.overlay", "Route Pod traffic between nodes; compatible with flannel."),
    "playground": ("narthex.cli.playground", "Explain pasted rules in a browser."),
    "plan": ("narthex.cli.plan", "Show the plan: the decision for every packet to a Service."),
    "proxy": ("narthex.cli.proxy", "Run the node proxy in this network namespace."),
    "query": ("narthex.cli.query", "Answer a question about all packets of a node."),
    "render": ("narthex.cli.render", "Print the rules of a mode for the plan."),
    "scenario": ("narthex.cli.scenario", "Check packet-flow scenarios against plan, rules, and kernel."),
    "top": ("narthex.cli.top", "Show new connections per Service and endpoint, from kernel counters."),
    "trace": ("narthex.cli.trace", "Explain the path of a packet through Services, step by step."),
    "ui": ("narthex.cli.ui", "Show a diagram of a cluster in a browser."),
}


_EXTRAS = {
    "dns": ("dnspython", "dns"),
    "google": ("protobuf", "lab"),
    "mcp": ("mcp", "mcp"),
    "mcp_types": ("mcp", "mcp"),
    "jsonpatch": ("jsonpatch", "lab"),
    "re2": ("google-re2", "dns"),
    "rich": ("rich", "ui"),
    "wsproto": ("wsproto", "lab"),
}
"""Optional modules: the package of each one, and the extra that installs it."""


class _LazyGroup(click.Group):
    """A group that imports the module of a command only when needed, so that `narthex --help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command, or None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises ClickException with the extra to install if an optional package is missing."""
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
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in sorted(_COMMANDS)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@version_option
def main() -> None:
    """Plan, program, and explain the Kubernetes Service network."""
