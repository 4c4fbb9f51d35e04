"""A container runtime's side of the specification.

A container is added to a network by the plugins of the network's configuration, in order, and removed in reverse order. The
configuration of an ADD is stored first, so that DEL uses the same one even if it has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from narthex.cni import fields, result
from narthex.cni.errors import CniError
from narthex.cni.kernel import files
from narthex.cni.program import delegate
from narthex.cni.request import configuration, is_interface, is_name
from narthex.cni.result import CniResult
from narthex.linux.namespaces import in_namespace

_NO_VERSION = "0.1.0"


class NetworkConfigList(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a network: a list of plugins (`*.conflist`)."""

    name: str
    version: str
    plugins: tuple[Mapping[str, Any], ...]


class RuntimeConf(msgspec.Struct, frozen=True, kw_only=True):
    """A container to add to a network."""

    id: str
    namespace: str
    """Path of its network namespace."""
    interface: str = "eth0"
    args: Mapping[str, str] = {}
    """CNI_ARGS for the plugins, such as the pod's name."""
    capabilities: Mapping[str, Any] = {}
    """Capability arguments by name (`portMappings`), for plugins that declare the capability."""


class _Added(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of an ADD."""

    network: NetworkConfigList
    container: RuntimeConf
    result: dict[str, Any] | None = None
    """None while the ADD is running."""


_RECORDS = msgspec.json.Decoder(_Added)


def read_network(data: bytes) -> NetworkConfigList:
    """Parse a `*.conflist`. Raises CniError."""
    config = configuration(data)
    name = fields.text(config, "name")
    if not is_name(name):
        raise fields.wrong("name", f"{name[:64]!r} is not a network's name")
    plugins = tuple(fields.objects(config, "plugins"))
    if not plugins:
        raise fields.wrong("plugins", "must be a list with one plugin or more")
    for number, plugin in enumerate(plugins):
        if not fields.text(plugin, "type", f"plugins[{number}]."):
            raise fields.wrong(f"plugins[{number}].type", "must name a plugin")
    return NetworkConfigList(name=name, version=fields.text(config, "cniVersion") or _NO_VERSION, plugins=plugins)


class Runtime:
    """Runs plugins on one node. Thread-safe, except for concurrent calls for the same container."""

    def __init__(self, programs: Sequence[Path], state: Path, namespace: str | None = None) -> None:
        """Set the plugin directories, the state directory, and the node's network namespace by name (None: the current one)."""
        self._path = ":".join(map(str, programs))
        self._state = str(state)
        self._namespace = namespace

    def add(self, network: NetworkConfigList, container: RuntimeConf) -> CniResult:
        """Add a container to a network; return the result. Raises CniError after a failed ADD has been reverted."""
        if not is_name(container.id) or not is_interface(container.interface):
            raise fields.wrong(
                "container", f"{container.id[:64]!r}, {container.interface[:32]!r}: no container's names"
            )
        added = _Added(network=network, container=container)
        self._store(added)
        answer: dict[str, Any] | None = None
        try:
            for plugin in network.plugins:
                answer = delegate.object_of(self._run("ADD", added, plugin, answer), str(plugin["type"]))
            assert answer is not None, "a network has a plugin"
            self._store(msgspec.structs.replace(added, result=answer))
            return result.read(answer, "the result: ")
        except BaseException:
            with suppress(CniError, OSError):
                self.delete(network.name, container)
            raise

    def delete(self, network: str, container: RuntimeConf) -> None:
        """Remove a container from a network, if it is there.

        All plugins are run. Raises CniError with the first failure; `delete` must be repeated then.
        """
        added = self._added(network, container)
        if added is None:
            return
        errors = []
        for plugin in reversed(added.network.plugins):
            try:
                self._run("DEL", added, plugin, added.result)
            except CniError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        files.remove(self._file(network, container))

    def _run(self, command: str, added: _Added, plugin: Mapping[str, Any], before: Mapping[str, Any] | None) -> bytes:
        container = added.container
        config = {**plugin, "name": added.network.name, "cniVersion": added.network.version}
        has = fields.part(plugin, "capabilities")
        passed = {name: value for name, value in container.capabilities.items() if has.get(name) is True}
        if passed:
            config["runtimeConfig"] = passed
        if before is not None:
            config["prevResult"] = before
        environment = delegate.environment(
            command, container.id, container.namespace, container.interface, _checked(container.args), self._path
        )
        # A program starts in the network namespace of the calling thread.
        with in_namespace(self._namespace):
            return delegate.execute(str(plugin["type"]), environment, msgspec.json.encode(config))

    def _file(self, network: str, container: RuntimeConf) -> str:
        return f"{self._state}/{network}:{container.id}:{container.interface}"

    def _store(self, added: _Added) -> None:
        directory, _, name = self._file(added.network.name, added.container).rpartition("/")
        files.write(directory, name, msgspec.json.encode(added))

    def _added(self, network: str, container: RuntimeConf) -> _Added | None:
        data = files.read(self._file(network, container))
        return None if data is None else _RECORDS.decode(data)


def _checked(args: Mapping[str, str]) -> Mapping[str, str]:
    for key, value in args.items():
        if any(mark in f"{key}{value}" for mark in ";=\0"):
            raise fields.wrong("CNI_ARGS", f"{key[:32]!r}: {value[:64]!r} cannot be passed: no ';' and no '='")
    return args
