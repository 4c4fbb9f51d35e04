"""The runtime's half of the specification: a container is put on a network by the programs that the network's
configuration names, one after the other, and taken off the other way round.

What was added is written down first, so that it is removed by what was in force then, whatever becomes of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from narthex.cni import fields, result
from narthex.cni.errors import DECODING_FAILURE, OTHER, CniError
from narthex.cni.kernel import files
from narthex.cni.program import delegate
from narthex.cni.request import is_interface, is_name
from narthex.cni.result import CniResult
from narthex.linux import namespaces as netns

_NO_VERSION = "0.1.0"


class NetworkConfigList(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a network: a list of plugins (`*.conflist`)."""

    name: str
    version: str
    """Of the specification."""
    plugins: tuple[Mapping[str, Any], ...]


class RuntimeConf(msgspec.Struct, frozen=True, kw_only=True):
    """What is put on a network."""

    id: str
    namespace: str
    """Path of its network namespace."""
    interface: str = "eth0"
    args: Mapping[str, str] = {}
    """What plugins are told in CNI_ARGS, such as the pod's name."""
    capabilities: Mapping[str, Any] = {}
    """By name (`portMappings`); told to the plugins that have the capability."""


class _Added(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an ADD."""

    network: NetworkConfigList
    container: RuntimeConf
    result: dict[str, Any] | None = None
    """None: the ADD has begun and is not over."""


def read_network(data: bytes) -> NetworkConfigList:
    """A `*.conflist`. Raises CniError."""
    try:
        config = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise CniError(DECODING_FAILURE, f"the network configuration cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CniError(DECODING_FAILURE, "the network configuration must be an object")
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
    """Runs plugins on one node. Containers may be added and removed from several threads, each by one at a time."""

    def __init__(self, programs: Sequence[Path], kept: Path, namespace: str | None = None) -> None:
        """`programs`: the folders with the plugins. `kept`: the folder for what is written down of each container.
        `namespace`: the node's, by name; None is the present one."""
        self._path = ":".join(map(str, programs))
        self._kept = str(kept)
        self._namespace = namespace

    def add(self, network: NetworkConfigList, container: RuntimeConf) -> CniResult:
        """Put a container on a network; what it has there. Raises CniError; then it is not on it."""
        if not is_name(container.id) or not is_interface(container.interface):
            raise fields.wrong(
                "container", f"{container.id[:64]!r}, {container.interface[:32]!r}: no container's names"
            )
        added = _Added(network=network, container=container)
        self._keep(added)
        said: dict[str, Any] | None = None
        try:
            for plugin in network.plugins:
                said = _object(self._run("ADD", added, plugin, said), str(plugin["type"]))
            assert said is not None, "a network has a plugin"
            self._keep(msgspec.structs.replace(added, result=said))
            return result.read(said, "the result: ")
        except BaseException:
            with suppress(CniError, OSError):
                self.delete(network.name, container)
            raise

    def delete(self, network: str, container: RuntimeConf) -> None:
        """Take a container off a network; it may be off it. Every plugin is asked, whatever the others say. Raises
        CniError with the first complaint; then `delete` is to be called again."""
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
        config = {**plugin, "name": added.network.name, "cniVersion": added.network.version}
        has = fields.part(plugin, "capabilities")
        told = {name: value for name, value in added.container.capabilities.items() if has.get(name) is True}
        if told:
            config["runtimeConfig"] = told
        if before is not None:
            config["prevResult"] = before
        environment = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": added.container.id,
            "CNI_NETNS": added.container.namespace,
            "CNI_IFNAME": added.container.interface,
            "CNI_ARGS": _joined(added.container.args.items()),
            "CNI_PATH": self._path,
        }
        # A program is where the thread is that starts it.
        with netns.entered(self._namespace):
            return delegate.execute(str(plugin["type"]), environment, msgspec.json.encode(config))

    def _file(self, network: str, container: RuntimeConf) -> str:
        return f"{self._kept}/{network}:{container.id}:{container.interface}"

    def _keep(self, added: _Added) -> None:
        directory, _, name = self._file(added.network.name, added.container).rpartition("/")
        files.write(directory, name, msgspec.json.encode(added))

    def _added(self, network: str, container: RuntimeConf) -> _Added | None:
        data = files.read(self._file(network, container))
        return None if data is None else msgspec.json.decode(data, type=_Added)


def _joined(args: Iterable[tuple[str, str]]) -> str:
    for key, value in args:
        if any(mark in f"{key}{value}" for mark in ";=\0"):
            raise fields.wrong("CNI_ARGS", f"{key[:32]!r}: {value[:64]!r} cannot be told: no ';' and no '='")
    return ";".join(f"{key}={value}" for key, value in args)


def _object(answer: bytes, plugin: str) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise CniError(OTHER, f"plugin {plugin} answered what cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise CniError(OTHER, f"plugin {plugin} did not answer with an object")
    return said
