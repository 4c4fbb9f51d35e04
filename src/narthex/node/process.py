"""`narthex node` as a program: selects the parts and applies configuration changes to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from narthex.kube.messages import prepare_decoders
from narthex.kube.origin import Origin
from narthex.node.parts import NodePart, NodeSupervisor
from narthex.node.table import PARTS, PartDefinition, PartInputs, ReconfigurablePart, switched_on
from narthex.proxy.program.reload import ConfigurationFile
from narthex.proxy.program.settings import ProxySettings
from narthex.proxy.program.start import run_process
from narthex.proxy.program.status import StatusPorts
from narthex.runtime.process import StartError
from narthex.runtime.status import PartReport


def serve_node(settings: ProxySettings, origin: Callable[[], Origin], file: ConfigurationFile | None = None) -> None:
    """Run all enabled parts until SIGTERM, SIGINT, or a configuration change that needs a new process.

    `origin` creates a new source for each run of a part. Raises StartError.
    """
    work = NodeProgram(settings, origin)
    run_process(work, settings, work.status, origin().creator, file)


class NodeProgram:
    """The parts of a node and the settings in force."""

    def __init__(self, settings: ProxySettings, origin: Callable[[], Origin]) -> None:
        """Select the enabled parts. Raises StartError if all are disabled."""
        self._settings = settings
        self._origin = origin
        self._lock = threading.Lock()
        """Held so that a part is either created from the settings in force or told about a change of them."""
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
        if len(self._entries) > 1:
            prepare_decoders()
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
