"""Requests of a container runtime to a plugin: the environment and standard input, validated before anything happens."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import DECODING_FAILURE, INCOMPATIBLE_VERSION, INVALID_CONFIG, INVALID_ENVIRONMENT, CniError
from narthex.cni.json import JsonError, parse
from narthex.cni.keys import spelled_as_documented
from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
"""All versions of the specification, oldest first."""
NEWEST = VERSIONS[-1]
DEFAULT_VERSION = "0.1.0"
"""Version of a configuration without `cniVersion`."""

_SINCE = {"ADD": "0.1.0", "DEL": "0.1.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
COMMANDS = ("VERSION", *_SINCE)
_NEEDED = {
    "ADD": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "CHECK": ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME"),
}
_NAME_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_NAME_MARKS = frozenset("_.-")
_MOST_NAME = 160
"""Names become parts of file names, three per file, which are limited to 255 bytes."""
ADDRESS_ARGUMENTS = ("IP", "MAC")
"""Keys of CNI_ARGS that plugins with addresses know."""
_TRUE = ("1", "t", "T", "true", "TRUE", "True")


class CniRequest(Value):
    """One invocation of a plugin."""

    plugin: str
    command: str
    version: str
    """Version of the specification, of both the configuration and the result."""
    network: str
    container: str
    interface: str
    namespace: str
    """Path of the pod's network namespace; may be empty for DEL, GC, and STATUS."""
    args: Mapping[str, str]
    path: str
    """Directories of plugins, separated by colons."""
    config: Mapping[str, object]
    stdin: bytes = b""
    """The configuration as received, for delegates."""

    @property
    def attachment(self) -> str:
        """Name of the attachment for messages and file names; none of its parts contains a colon."""
        return f"{self.network}:{self.container}:{self.interface}"


def read(plugin: str, environment: Mapping[str, str], stdin: bytes) -> CniRequest:
    """Validate and parse an invocation. Raises CniError. Not for the command VERSION."""
    command = environment.get("CNI_COMMAND", "")
    if command not in _SINCE:
        said = f"unknown CNI_COMMAND {command[:64]!r}" if command else "required env variables [CNI_COMMAND] missing"
        raise CniError(INVALID_ENVIRONMENT, said)
    missing = [name for name in _NEEDED.get(command, ()) if not environment.get(name)]
    if missing:
        raise CniError(INVALID_ENVIRONMENT, f"required env variables [{','.join(missing)}] missing")
    config = configuration(stdin)
    version = version_of(config)
    if VERSIONS.index(version) < VERSIONS.index(_SINCE[command]):
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"config version does not allow {command}",
            f"cniVersion is {version}; {command} needs {_SINCE[command]} or later",
        )
    network = fields.text(config, "name")
    if not network or not is_name(network):
        raise CniError(INVALID_CONFIG, f"name: {network[:64]!r} is not a network name: {_NAME_RULE}")
    container, interface = environment.get("CNI_CONTAINERID", ""), environment.get("CNI_IFNAME", "")
    if command in _NEEDED:
        _check_attachment(container, interface, network)
    return CniRequest(
        plugin,
        command,
        version,
        network,
        container,
        interface,
        environment.get("CNI_NETNS", ""),
        _arguments(environment.get("CNI_ARGS", ""), command),
        environment.get("CNI_PATH", ""),
        config,
        stdin,
    )


_NAME_RULE = f"a letter or digit, then letters, digits, '_', '.' and '-', {_MOST_NAME} at most"


def configuration(stdin: bytes) -> Mapping[str, object]:
    """Return the object on standard input, with the documented spelling of keys. Raises CniError."""
    try:
        config = spelled_as_documented(parse(stdin))
    except JsonError as error:
        raise CniError(DECODING_FAILURE, f"the network configuration cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CniError(DECODING_FAILURE, "the network configuration must be an object")
    return config


def version_of(config: Mapping[str, object]) -> str:
    """Return the specification version of a configuration. Raises CniError."""
    version = fields.text(config, "cniVersion") or DEFAULT_VERSION
    if version not in VERSIONS:
        details = f'config is "{version[:32]}", plugin supports {list(VERSIONS)}'
        raise CniError(INCOMPATIBLE_VERSION, "incompatible CNI versions", details)
    return version


def ipam_of(config: Mapping[str, object]) -> str:
    """Return the configured IPAM plugin, or empty. Raises CniError."""
    return fields.text(fields.part(config, "ipam"), "type", "ipam.")


def is_name(name: str) -> bool:
    """Return True if a text is a valid container ID or network name."""
    return (
        0 < len(name) <= _MOST_NAME
        and name[0] in _NAME_LETTERS
        and all(character in _NAME_LETTERS or character in _NAME_MARKS for character in name)
    )


def is_interface(name: str) -> bool:
    """Return True if a text is a valid interface name. Control characters are rejected, unlike in the kernel."""
    return (
        0 < len(name.encode("utf-8", "surrogateescape")) <= 15
        and name not in (".", "..")
        and not any(character in "/:" or character.isspace() for character in name)
        and name.isprintable()
    )


def is_attachment(container: object, interface: object) -> bool:
    """Return True if two untyped values identify an attachment."""
    return isinstance(container, str) and isinstance(interface, str) and is_name(container) and is_interface(interface)


def _check_attachment(container: str, interface: str, network: str) -> None:
    if not is_name(container):
        message = f"CNI_CONTAINERID: {container[:64]!r} is not a container id: {_NAME_RULE}"
        raise CniError(INVALID_ENVIRONMENT, message)
    if not is_interface(interface):
        message = f"CNI_IFNAME: {interface[:32]!r} is not an interface name: 1 to 15 bytes, no '/', ':' or space"
        raise CniError(INVALID_ENVIRONMENT, message)
    if len(network) + len(container) > 220:
        message = "CNI_CONTAINERID and the network's name are too long together: at most 220 characters"
        raise CniError(INVALID_ENVIRONMENT, message)


def _arguments(text: str, command: str) -> Mapping[str, str]:
    """Parse CNI_ARGS. Errors are ignored for DEL."""
    found: dict[str, str] = {}
    for pair in text.split(";") if text else ():
        key, equals, value = pair.partition("=")
        if equals and key:
            found[key] = value
        elif command != "DEL":
            raise CniError(INVALID_ENVIRONMENT, f"CNI_ARGS: {pair[:64]!r} is not KEY=VALUE")
    return found


def check_arguments(request: CniRequest, known: tuple[str, ...]) -> None:
    """Reject unknown keys of CNI_ARGS unless IgnoreUnknown is set. Raises CniError."""
    if request.args.get("IgnoreUnknown", "") in _TRUE:
        return
    unknown = [key for key in request.args if key not in known and key != "IgnoreUnknown"]
    if unknown:
        names = ", ".join(repr(key[:32]) for key in unknown)
        raise CniError(INVALID_ENVIRONMENT, f"CNI_ARGS: unknown args {names}", "IgnoreUnknown=1 would allow them")


_VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""Key of the list for GC; the second is an error of the specification that libcni still writes."""


def knows_attachments(request: CniRequest) -> bool:
    """Return True if a GC request has the list of attachments to keep. Without one, nothing may be removed."""
    return any(name in request.config for name in _VALID_ATTACHMENTS)


def valid_attachments(request: CniRequest) -> frozenset[tuple[str, str]]:
    """Return container ID and interface of each attachment that GC must keep. Raises CniError.

    An invalid entry is an error: cleaning up with a partly understood list would disconnect pods.
    """
    name = next(name for name in _VALID_ATTACHMENTS if name in request.config)
    found = set()
    for number, one in enumerate(fields.objects(request.config, name)):
        container, interface = one.get("containerID"), one.get("ifname")
        if not is_attachment(container, interface):
            raise fields.wrong(f"{name}[{number}]", "needs containerID and ifname")
        found.add((container, interface))
    return frozenset(found)  # type: ignore[arg-type]
