"""What the commands that run a proxy have in common: where objects come from, and settings that may change."""

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
        help="File or directory of YAML and JSON manifests, instead of an API server; edits take effect while running.",
    ),
    click.option("--master", metavar="URL", default="", help="The API server; it overrides the kubeconfig's."),
    click.option(
        "--config", type=click.Path(path_type=Path), help="A KubeProxyConfiguration; it wins over most flags."
    ),
    with_flags,
    click.option("--healthz-port", type=click.IntRange(0, 65535), hidden=True),
    click.option("--metrics-port", type=click.IntRange(0, 65535), hidden=True),
)


def with_source(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that say what to follow and how."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def begin(given: Mapping[str, Any], config: Path | None) -> tuple[ProxySettings, ConfigurationFile | None]:
    """Settings by fields that were given and by a file, and that file, to be followed. From here on there is a log; it
    has the warnings. Raises SettingsError."""
    from narthex.proxy.program.dataplane import check_machine
    from narthex.proxy.program.reload import ConfigurationFile
    from narthex.proxy.program.settings import settings
    from narthex.runtime import logs

    def read() -> ProxySettings:
        return settings(given, config, os.uname().nodename)

    logs.start_logging(sys.stderr)
    # Before it is read: an edit while the proxy starts is seen.
    file = ConfigurationFile(config, read, check_machine) if config else None
    told = read()
    logs.start_logging(sys.stderr, told.logging)
    for warning in told.warnings:
        logs.LOGGER.warning("%s", warning)
    return told, file


def source(told: ProxySettings, manifests: Path | None, master: str) -> Callable[[], Origin]:
    """Makes what is to be followed. Raises UsageError when that was not said."""
    if manifests is not None:
        return partial(_directory, manifests)
    if not (told.client.kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise click.UsageError("nothing to follow: give --kubeconfig, --master or --manifests (this is not a pod)")
    return partial(_api_server, told, master)


def _directory(manifests: Path) -> Origin:
    from narthex.kube.manifests import ManifestSource
    from narthex.kube.origin import Origin

    return Origin(ManifestSource(manifests))


def _api_server(told: ProxySettings, master: str) -> Origin:
    from narthex.kube.access import Access
    from narthex.kube.origin import api_origin
    from narthex.linux.clock import SystemClock

    access = Access(connection=told.client, master=master)
    return api_origin(access, told.node.node_name, told.config_sync_period, SystemClock().wall)
