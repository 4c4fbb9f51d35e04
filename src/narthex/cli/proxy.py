"""`narthex proxy`: the node proxy. `narthex node` has the same flags, source of objects, and settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narthex.cli.options import master_option, require_followed_source, with_options
from narthex.cli.output import reported_errors
from narthex.cli.proxy_flags import CONTEXT, FLAGS, fields, with_ports
from narthex.cli.version import version_option

if TYPE_CHECKING:
    from narthex.kube.source import Origin
    from narthex.proxy.program.reload import ConfigurationFile
    from narthex.proxy.program.settings import ProxySettings


with_source = with_options(
    click.option(
        "--manifests",
        type=click.Path(path_type=Path),
        help="File or directory of YAML and JSON manifests instead of an API server; changes take effect immediately.",
    ),
    master_option,
    click.option(
        "--config", type=click.Path(path_type=Path), help="KubeProxyConfiguration file; overrides most flags."
    ),
    *(flag.option for flag in FLAGS),
    click.option("--healthz-port", type=click.IntRange(0, 65535), hidden=True),
    click.option("--metrics-port", type=click.IntRange(0, 65535), hidden=True),
)
"""Options for the source of objects and for the settings."""


def begin(given: Mapping[str, Any], config: Path | None) -> tuple[ProxySettings, ConfigurationFile | None]:
    """Start logging and read the settings from flags and a file. Return them with the file to watch. Raises SettingsError."""
    from narthex.proxy.program.dataplane import check_machine
    from narthex.proxy.program.reload import ConfigurationFile
    from narthex.proxy.program.settings import settings
    from narthex.runtime.logs import LOGGER, start_logging

    def read() -> ProxySettings:
        """Read the settings from the flags and the file: now, and again after each change of the file."""
        return settings(given, config, os.uname().nodename)

    start_logging(sys.stderr)
    # Created before the file is read, so that a change during start-up is noticed.
    file = ConfigurationFile(config, read, check_machine) if config else None
    configured = read()
    start_logging(sys.stderr, configured.logging)
    for warning in configured.warnings:
        LOGGER.warning("%s", warning)
    return configured, file


def source(configured: ProxySettings, manifests: Path | None, master: str) -> Callable[[], Origin]:
    """Return a factory of the source of objects. Raises ClickException if none was given, or the kubeconfig cannot be read."""
    if manifests is not None:
        return partial(_directory, manifests)
    require_followed_source(configured.client.kubeconfig, master)
    return partial(_api_server, configured, master)


def _directory(manifests: Path) -> Origin:
    from narthex.kube.manifests import ManifestSource
    from narthex.kube.source import Origin

    return Origin(ManifestSource(manifests))


def _api_server(configured: ProxySettings, master: str) -> Origin:
    from narthex.kube.access import Access
    from narthex.kube.source import api_origin
    from narthex.linux.clock import SystemClock

    access = Access(connection=configured.client, master=master)
    return api_origin(access, configured.node.node_name, configured.config_sync_period, SystemClock().wall)


@click.command("proxy", context_settings=CONTEXT)
@with_source
@click.option("--init-only", is_flag=True, help="Apply the kernel settings that can be applied, and exit.")
@click.option("--cleanup", is_flag=True, help="Remove all rules as `narthex cleanup` does, and exit.")
@click.option(
    "--write-config-to", type=click.Path(path_type=Path), help="Write the configuration with all defaults, and exit."
)
@version_option
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
    """Run the node proxy: program the current network namespace until stopped.

    The proxy watches Services, EndpointSlices, ServiceCIDRs, and this Node at an API server, or reads them from --manifests. On
    SIGTERM or SIGINT it stops, and the rules remain. `/healthz` returns 200 if all rules are in place.
    """
    if cleanup:
        from narthex.cli.cleanup import command as clean

        context.invoke(clean, output="text")
        return
    from narthex.node.verification import change_verifier
    from narthex.proxy.program.settings import in_force
    from narthex.proxy.program.start import prepare, serve

    given = with_ports(fields(flags), healthz_port, metrics_port)
    with reported_errors():
        if write_config_to is not None:
            _write(write_config_to, in_force(given, config))
            return
        configured, file = begin(given, config)
        if init_only:
            prepare(configured)
        else:
            serve(configured, source(configured, manifests, master)(), change_verifier, file)


def _write(path: Path, configuration: Any) -> None:
    from narthex.runtime.configuration.file import file_text

    try:
        path.write_text(file_text(configuration))
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)
