"""Options and start-up that the commands which run a proxy share: the source of objects, and the settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from narthex.cli.proxy.flags import with_flags

if TYPE_CHECKING:
    from narthex.kube.origin import Origin
    from narthex.proxy.program.reload import ConfigurationFile
    from narthex.proxy.program.settings import ProxySettings

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "token_normalize_func": lambda token: token.replace("_", "-"),
}

_OPTIONS = (
    click.option(
        "--manifests",
        type=click.Path(path_type=Path),
        help="File or directory of YAML and JSON manifests instead of an API server; changes take effect immediately.",
    ),
    click.option("--master", metavar="URL", default="", help="URL of the API server; overrides the kubeconfig."),
    click.option(
        "--config", type=click.Path(path_type=Path), help="KubeProxyConfiguration file; overrides most flags."
    ),
    with_flags,
    click.option("--healthz-port", type=click.IntRange(0, 65535), hidden=True),
    click.option("--metrics-port", type=click.IntRange(0, 65535), hidden=True),
)


def with_source(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the source of objects and for the settings."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def begin(given: Mapping[str, Any], config: Path | None) -> tuple[ProxySettings, ConfigurationFile | None]:
    """Start logging and read the settings from flags and a file. Return them with the file to watch. Raises SettingsError."""
    from narthex.proxy.program.dataplane import check_machine
    from narthex.proxy.program.reload import ConfigurationFile
    from narthex.proxy.program.settings import settings
    from narthex.runtime import logs

    def read() -> ProxySettings:
        return settings(given, config, os.uname().nodename)

    logs.start_logging(sys.stderr)
    # Created before the file is read, so that a change during start-up is noticed.
    file = ConfigurationFile(config, read, check_machine) if config else None
    configured = read()
    logs.start_logging(sys.stderr, configured.logging)
    for warning in configured.warnings:
        logs.LOGGER.warning("%s", warning)
    return configured, file


def source(configured: ProxySettings, manifests: Path | None, master: str) -> Callable[[], Origin]:
    """Return a factory of the source of objects. Raises UsageError if no source was given."""
    if manifests is not None:
        return partial(_directory, manifests)
    if not (configured.client.kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise click.UsageError(
            "no source of objects: use --kubeconfig, --master, or --manifests (not running in a Pod)"
        )
    return partial(_api_server, configured, master)


def _directory(manifests: Path) -> Origin:
    from narthex.kube.manifests import ManifestSource
    from narthex.kube.origin import Origin

    return Origin(ManifestSource(manifests))


def _api_server(configured: ProxySettings, master: str) -> Origin:
    from narthex.kube.access import Access
    from narthex.kube.origin import api_origin
    from narthex.linux.clock import SystemClock

    access = Access(connection=configured.client, master=master)
    return api_origin(access, configured.node.node_name, configured.config_sync_period, SystemClock().wall)
