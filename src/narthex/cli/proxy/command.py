"""`narthex proxy`: the node proxy, with the flags of kube-proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import narthex
from narthex.cli.following import CONTEXT, begin, source, with_source
from narthex.cli.proxy.flags import fields, with_ports


@click.command("proxy", context_settings=CONTEXT)
@with_source
@click.option("--init-only", is_flag=True, help="Apply the kernel settings that can be applied, and exit.")
@click.option("--cleanup", is_flag=True, help="Remove all rules as `narthex cleanup` does, and exit.")
@click.option(
    "--write-config-to", type=click.Path(path_type=Path), help="Write the configuration with all defaults, and exit."
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
    """Run the node proxy: program the current network namespace until stopped.

    The proxy watches Services, EndpointSlices, ServiceCIDRs, and this Node at an API server, or reads them from --manifests. On
    SIGTERM or SIGINT it stops, and the rules remain. `/healthz` returns 200 if all rules are in place.
    """
    if cleanup:
        from narthex.cli.cleanup import command as clean

        context.invoke(clean, output="text")
        return
    from narthex.proxy.program.settings import SettingsError, in_force
    from narthex.proxy.program.start import prepare, serve
    from narthex.runtime import logs
    from narthex.runtime.process import StartError

    given = with_ports(fields(flags), healthz_port, metrics_port)
    try:
        if write_config_to is not None:
            _write(write_config_to, in_force(given, config))
            return
        configured, file = begin(given, config)
        if init_only:
            prepare(configured)
        else:
            serve(configured, source(configured, manifests, master)(), file)
    except SettingsError as error:
        # One line per error of the file.
        raise click.ClickException(logs.printable_lines(str(error))) from error
    except StartError as error:
        raise click.ClickException(logs.printable(str(error))) from error


def _write(path: Path, configuration: Any) -> None:
    from narthex.runtime.configuration.file import file_text

    try:
        path.write_text(file_text(configuration))
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)
