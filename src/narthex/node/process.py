"""`narthex node` as a program: selects the parts and applies configuration changes to them."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from narthex.kube.source import Origin
from narthex.linux.memory import return_freed_memory
from narthex.node.parts import NodePart, NodeSupervisor
from narthex.node.verification import change_verifier
from narthex.proxy.program.reload import ConfigurationFile
from narthex.proxy.program.settings import ProxySettings
from narthex.proxy.program.start import ProxyPart, run_process
from narthex.proxy.program.status import PROXY, StatusPorts
from narthex.runtime.metrics import Collector
from narthex.runtime.process import StartError
from narthex.runtime.status import PartReport


def serve_node(settings: ProxySettings, origin: Callable[[], Origin], file: ConfigurationFile | None = None) -> None:
    """Run all enabled parts until SIGTERM, SIGINT, or a configuration change that needs a new process.

    `origin` creates a new source for each run of a part. Raises StartError.
    """
    return_freed_memory()
    work = NodeProgram(settings, origin)
    run_process(work, settings, work.status, origin().creator, file)


class NodeProgram:
    """The parts of a node and the settings in force."""

    def __init__(self, settings: ProxySettings, origin: Callable[[], Origin]) -> None:
        """Select the enabled parts. Raises StartError if all are disabled."""
        self._settings = settings
        self._origin = origin
        self._lock = threading.Lock()
        """Held so that a part is either created from the settings in force or notified of a change."""
        self._made: dict[str, NodePart] = {}
        """The latest run of each part."""
        self._entries = switched_on(settings)
        if not self._entries:
            flags = ", ".join(f"--{name}" for name in PARTS)
            raise StartError(f"every part is switched off, so there is nothing to do: switch one on ({flags})")
        self._node = NodeSupervisor((name, partial(self._make, name, entry)) for name, entry in self._entries.items())
        self.status = StatusPorts(self.report, (self._node,))

    def run(self) -> None:
        """Run all parts until `stop`."""
        # Decoders are built where modules are loaded, which threads must not do at the same time.
        for entry in self._entries.values():
            for module in entry.modules:
                importlib.import_module(module)
        self._node.run()

    def stop(self) -> None:
        """End `run`. Safe in a signal handler."""
        self._node.stop()

    def report(self) -> dict[str, PartReport]:
        """Return the state of each part."""
        return self._node.report()

    def take_over(self, fresh: ProxySettings) -> None:
        """Apply other settings: to running parts if they support it, otherwise by new runs."""
        with self._lock:
            before, self._settings = self._settings, fresh
            made = dict(self._made)
        for name, part in made.items():
            entry = self._entries[name]
            if isinstance(part, ReconfigurablePart):
                part.take_over(fresh)
            elif entry.made_of(fresh) != entry.made_of(before):
                self._node.renew(name)

    def _make(self, name: str, entry: PartDefinition) -> NodePart:
        # What an earlier run holds is to be gone before the next one is made.
        self._made.pop(name, None)
        with self._lock:
            part = entry.make(PartInputs(self._settings, self._origin, self.status, self._node))
            self._made[name] = part
        return part


class PartInputs(NamedTuple):
    """The inputs of a part's factory."""

    settings: ProxySettings
    """The settings in force."""
    origin: Callable[[], Origin]
    """Creates a new source of objects, with the API server behind it if there is one."""
    status: StatusPorts
    """The status ports of the process."""
    node: Collector
    """Metrics of the node as a whole."""


@runtime_checkable
class ReconfigurablePart(Protocol):
    """A part whose settings may change while it runs."""

    def take_over(self, fresh: ProxySettings) -> None:
        """Apply other settings. Called from another thread than `run`, possibly before it."""
        ...


class PartDefinition(NamedTuple):
    """The definition of one part."""

    make: Callable[[PartInputs], NodePart]
    """Creates the part for one run. Its modules are imported here, so that disabled parts cost nothing."""
    made_of: Callable[[ProxySettings], object]
    """Returns the settings that the part depends on. If they change, the part is created anew, unless it is
    reconfigurable.
    """
    modules: tuple[str, ...] = ()
    """What `make` imports. Loaded before the first part runs."""


def _proxy(given: PartInputs) -> NodePart:
    if gc.get_freeze_count():
        # An earlier run leaves many reference cycles, which are not collected while a proxy starts.
        gc.unfreeze()
        gc.collect()
    origin = given.origin()
    origin = origin._replace(collectors=(*origin.collectors, given.node))
    return ProxyPart(given.settings, origin, given.status, change_verifier)


def _cni(given: PartInputs) -> NodePart:
    from narthex.cni.program.agent import Agent

    settings = given.settings.own.cni
    return Agent(settings.socket, settings.state_directory)


def _overlay(given: PartInputs) -> NodePart:
    from narthex.overlay.program.loop import settings_of
    from narthex.overlay.program.part import OverlayOrigin, OverlayPart, api_origin

    origin = given.origin()
    nodes = api_origin(origin.access) if origin.access is not None else OverlayOrigin(origin.source, None)
    return OverlayPart(settings_of(given.settings.own.overlay, given.settings.node.node_name), nodes)


def _dns(given: PartInputs) -> NodePart:
    from narthex.dns.program.node_local import build_node_local
    from narthex.proxy.kernel.dataplanes import DATAPLANES

    own = given.settings.own
    ipvs = own.parts.proxy and DATAPLANES[given.settings.mode].binds_addresses
    return build_node_local(own.dns, given.origin(), ipvs=ipvs)


def _announcer(given: PartInputs) -> NodePart:
    from narthex.lb.program.announcer import AnnouncerPart, origin_of

    settings = given.settings.own.announcer
    origin = origin_of(given.origin(), pools=not settings.pools_file)
    return AnnouncerPart(given.settings.node.node_name, settings, origin, given.status)


PARTS = {
    PROXY: PartDefinition(_proxy, lambda settings: settings),
    "cni": PartDefinition(_cni, lambda settings: settings.own.cni, ("narthex.cni.program.agent",)),
    "overlay": PartDefinition(
        _overlay,
        lambda settings: (settings.own.overlay, settings.node.node_name, settings.client),
        ("narthex.overlay.program.part",),
    ),
    "dns": PartDefinition(
        _dns,
        lambda settings: (settings.own.dns, settings.client, settings.mode),
        ("narthex.dns.program.node_local", "narthex.dns.program.worker_protocol"),
    ),
    "announcer": PartDefinition(
        _announcer,
        lambda settings: (settings.own.announcer, settings.node.node_name, settings.client),
        ("narthex.lb.program.announcer",),
    ),
}
"""By name, as in `parts` of a NarthexConfiguration, in start order."""


def switched_on(settings: ProxySettings) -> dict[str, PartDefinition]:
    """Return the enabled parts in start order."""
    on = msgspec.structs.asdict(settings.own.parts)
    return {name: entry for name, entry in PARTS.items() if on[name]}
