"""Which parts a node can have: how each is made, and what of the settings it is made of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from narthex.kube.origin import Origin
from narthex.node.parts import NodePart
from narthex.proxy.program.settings import ProxySettings
from narthex.proxy.program.start import ProxyPart
from narthex.proxy.program.status import PROXY, StatusPorts
from narthex.runtime.metrics import Collector


class PartInputs(NamedTuple):
    """What a part can be made of."""

    settings: ProxySettings
    """Those that are in force."""
    origin: Callable[[], Origin]
    """Makes a source of objects that has told nothing yet, and the API server behind it, if there is one."""
    status: StatusPorts
    """The status ports of the process."""
    node: Collector
    """What is counted of the node as a whole."""


@runtime_checkable
class ReconfigurablePart(Protocol):
    """A part that can go over to other settings while it runs."""

    def take_over(self, fresh: ProxySettings) -> None:
        """Called from another thread than `run`, perhaps before it."""
        ...


class PartDefinition(NamedTuple):
    """One part of a node."""

    make: Callable[[PartInputs], NodePart]
    """Makes it for one run. What a part needs is imported here, so that nobody waits for parts that are off."""
    made_of: Callable[[ProxySettings], object]
    """What it does not run without. Where this is another one in settings that come while it runs, it is ended and made
    anew, unless it is Adaptable."""


def _proxy(given: PartInputs) -> NodePart:
    if gc.get_freeze_count():
        # An earlier run leaves much in cycles, which nobody looks for while a proxy begins.
        gc.unfreeze()
        gc.collect()
    origin = given.origin()
    return ProxyPart(given.settings, origin._replace(collectors=(*origin.collectors, given.node)), given.status)


def _cni(given: PartInputs) -> NodePart:
    from narthex.cni.program.agent import Agent

    told = given.settings.own.cni
    return Agent(told.socket, told.state_directory)


def _overlay(given: PartInputs) -> NodePart:
    from narthex.overlay.program.part import OverlayOrigin, OverlayPart, api_origin
    from narthex.overlay.program.settings import settings_of

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

    told = given.settings.own.announcer
    origin = origin_of(given.origin(), pools=not told.pools_file)
    return AnnouncerPart(given.settings.node.node_name, told, origin, given.status)


PARTS = {
    PROXY: PartDefinition(_proxy, lambda told: told),
    "cni": PartDefinition(_cni, lambda told: told.own.cni),
    "overlay": PartDefinition(_overlay, lambda told: (told.own.overlay, told.node.node_name, told.client)),
    "dns": PartDefinition(_dns, lambda told: (told.own.dns, told.client, told.mode)),
    "announcer": PartDefinition(_announcer, lambda told: (told.own.announcer, told.node.node_name, told.client)),
}
"""By name, as `parts` of a NarthexConfiguration has them, in the order in which they start."""


def switched_on(settings: ProxySettings) -> dict[str, PartDefinition]:
    """The parts that are to run, in order."""
    on = msgspec.structs.asdict(settings.own.parts)
    return {name: entry for name, entry in PARTS.items() if on[name]}
