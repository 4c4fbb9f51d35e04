"""`narthex proxy`: kube-proxy's flags, and `--manifests`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import narthex
from narthex.cli.proxy_flags import fields, with_flags, with_ports

if TYPE_CHECKING:
    from narthex.apps.settings import Settings
    from narthex.apps.start import Origin

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


@click.command("proxy", context_settings=_SETTINGS)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    help="File or directory of YAML and JSON manifests, instead of an API server; edits take effect while running.",
)
@click.option("--master", metavar="URL", default="", help="The API server; it overrides the kubeconfig's.")
@click.option("--config", type=click.Path(path_type=Path), help="A KubeProxyConfiguration; it wins over most flags.")
@with_flags
@click.option("--healthz-port", type=click.IntRange(0, 65535), hidden=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), hidden=True)
@click.option("--init-only", is_flag=True, help="Make the kernel settings, as far as they can be made, and end.")
@click.option("--cleanup", is_flag=True, help="Remove all rules, as `narthex cleanup` does, and end.")
@click.option(
    "--write-config-to", type=click.Path(path_type=Path), help="Write the configuration with all defaults, and end."
)
@click.version_option(narthex.__version__, prog_name="narthex")
@click.pass_context
def command(
    context: click.Context,
    /,
    manifests: Path | None,
    master: str,
    config: Path | None,
    healthz_port: int | None,
    metrics_port: int | None,
    init_only: bool,
    cleanup: bool,
    write_config_to: Path | None,
    **flags: Any,
) -> None:
    """Be the node proxy: program the network namespace that this runs in until stopped.

    Follows Services, EndpointSlices, ServiceCIDRs and this Node at an API server, or reads them from MANIFESTS. On SIGTERM
    or SIGINT it ends; the rules stay. `/healthz` answers 200 when all rules are in place.
    """
    if cleanup:
        from narthex.cli.cleanup import command as clean

        context.invoke(clean, output="text")
        return
    from narthex.apps import logs
    from narthex.apps.reload import ConfigurationFile
    from narthex.apps.settings import SettingsError, in_force, settings
    from narthex.apps.start import Origin, StartError, check_machine, prepare, serve

    given = with_ports(fields(flags), healthz_port, metrics_port)

    def read() -> Settings:
        return settings(given, config, os.uname().nodename)

    logs.start(sys.stderr)
    try:
        if write_config_to is not None:
            _write(write_config_to, in_force(given, config))
            return
        # Before it is read: an edit while the proxy starts is seen.
        file = ConfigurationFile(config, read, check_machine) if config else None
        told = read()
        logs.start(sys.stderr, told.logging)
        for warning in told.warnings:
            logs.LOGGER.warning("%s", warning)
        if init_only:
            prepare(told)
        elif manifests is not None:
            from narthex.sources.manifests import ManifestSource

            serve(told, Origin(ManifestSource(manifests)), file)
        else:
            serve(told, _api_server(told, master), file)
    except (SettingsError, StartError) as error:
        raise click.ClickException(logs.printable(str(error))) from error


def _api_server(told: Settings, master: str) -> Origin:
    from narthex.apps.api_server import api_origin
    from narthex.host.clock import SystemClock
    from narthex.sources.kube.access import Access

    if not (told.client.kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise click.UsageError("nothing to follow: give --kubeconfig, --master or --manifests (this is not a pod)")
    access = Access(connection=told.client, master=master)
    return api_origin(access, told.node.node_name, told.config_sync_period, SystemClock().wall)


def _write(path: Path, configuration: Any) -> None:
    from narthex.sources.configuration_text import file_text

    try:
        path.write_text(file_text(configuration))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)
