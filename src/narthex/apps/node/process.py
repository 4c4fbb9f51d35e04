"""`narthex node` put together: which parts there are, and what each is made of."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from narthex.apps.machine import StartError
from narthex.apps.node.parts import Make, Node, PartReport
from narthex.apps.node.status import PROXY, Status
from narthex.apps.proxy.reload import ConfigurationFile
from narthex.apps.proxy.settings import Settings
from narthex.apps.proxy.start import Origin, ProxyPart, run_until_told


def serve_node(settings: Settings, origin: Callable[[], Origin], file: ConfigurationFile | None = None) -> None:
    """Run all parts that are switched on until SIGTERM or SIGINT, or until edits of the configuration file ask for a new
    process. `origin` makes one that has told nothing yet, for each run of a proxy. Raises StartError."""
    work = NodeWork(settings, origin)
    run_until_told(work, settings, work.status, origin().creator, file)


class NodeWork:
    """The parts of a node, with the settings that are in force."""

    def __init__(self, settings: Settings, origin: Callable[[], Origin]) -> None:
        """Raises StartError when every part is switched off."""
        self._settings = settings
        self._origin = origin
        self._lock = threading.Lock()
        """A part is made by the settings that are in force, or is told of those that are."""
        self._proxy: ProxyPart | None = None
        parts: dict[str, Make] = {}
        if settings.own.parts.proxy:
            parts[PROXY] = self._make_proxy
        if not parts:
            raise StartError(
                "every part is switched off, so there is nothing to do: switch one on (--proxy, `parts.proxy`)"
            )
        self._node = Node(parts.items())
        self.status = Status(self.report, (self._node,))

    def run(self) -> None:
        """Run all parts until `stop`."""
        self._node.run()

    def stop(self) -> None:
        """End `run`. Safe in a signal handler."""
        self._node.stop()

    def report(self) -> dict[str, PartReport]:
        """How each part is now."""
        return self._node.report()

    def take_over(self, fresh: Settings) -> None:
        """Go over to other settings."""
        with self._lock:
            self._settings = fresh
            proxy = self._proxy
        if proxy is not None:
            proxy.take_over(fresh)

    def _make_proxy(self) -> ProxyPart:
        if self._proxy is not None:
            # An earlier run leaves much in cycles, which nobody looks for while a proxy begins.
            self._proxy = None
            gc.unfreeze()
            gc.collect()
        origin = self._origin()
        # What a scrape shows beside the proxy's numbers.
        origin = origin._replace(collectors=(*origin.collectors, self._node))
        with self._lock:
            self._proxy = ProxyPart(self._settings, origin, self.status)
        return self._proxy
