"""The plugin `flannel`: turns what the overlay daemon wrote for this node into another plugin's configuration."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import CANNOT_ADD, CniError
from narthex.cni.json import parse_object, write
from narthex.cni.kernel import files
from narthex.cni.request import valid_attachments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.request import CniRequest

SUBNET_FILE = "/run/flannel/subnet.env"
DATA_DIR = "/var/lib/cni/flannel"
PASSED_ON = ("runtimeConfig", "args", "prevResult", "cni.dev/valid-attachments")
"""Fields that a runtime adds to the configuration, which the delegate needs as well."""


def subnet_file_of(request: CniRequest) -> str:
    """Return the path of `subnet.env`. Raises CniError."""
    return fields.directory(request.config, "subnetFile", "", SUBNET_FILE)


def saved_file_of(request: CniRequest) -> str:
    """Return the path of the delegate's saved configuration, which DEL uses. Raises CniError."""
    return f"{data_dir_of(request)}/{request.container}"


def data_dir_of(request: CniRequest) -> str:
    """Return the directory of saved configurations, one per container. Raises CniError."""
    return fields.directory(request.config, "dataDir", "", DATA_DIR)


def read_subnet_env(text: str, path: str) -> Mapping[str, str]:
    """Parse `NAME=VALUE` lines. Raises CniError if a required variable is missing."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals:
            found[name] = value
    networks = found.get("FLANNEL_NETWORK") or found.get("FLANNEL_IPV6_NETWORK")
    subnets = found.get("FLANNEL_SUBNET") or found.get("FLANNEL_IPV6_SUBNET")
    missing = [name for name in ("FLANNEL_MTU", "FLANNEL_IPMASQ") if not found.get(name)]
    missing += [] if networks else ["FLANNEL_NETWORK"]
    missing += [] if subnets else ["FLANNEL_SUBNET"]
    if missing:
        message = f"{path} is missing {', '.join(missing)}"
        raise CniError(CANNOT_ADD, message, "the overlay daemon has not finished its start-up")
    return found


def delegate_config(request: CniRequest, env: Mapping[str, str]) -> dict[str, object]:
    """Return the delegate's configuration. The configuration's own `delegate` takes precedence. Raises CniError."""
    config = request.config
    made = dict(fields.part(config, "delegate"))
    for name in ("name", "ipam"):
        if name in made:
            raise fields.wrong(f"delegate.{name}", "must not be there: the plugin sets it")
    made["name"] = request.network
    made.setdefault("type", "bridge")
    made.setdefault("cniVersion", request.version)
    masquerade = env["FLANNEL_IPMASQ"] == "true"
    if "ipMasq" not in made:
        # Masquerade in the plugin unless the overlay daemon does.
        made["ipMasq"] = not masquerade
    if "mtu" not in made:
        if not (env["FLANNEL_MTU"].isascii() and env["FLANNEL_MTU"].isdigit()):
            raise CniError(CANNOT_ADD, f"FLANNEL_MTU is {env['FLANNEL_MTU'][:16]!r}, not a number")
        made["mtu"] = int(env["FLANNEL_MTU"])
    if made["type"] == "bridge" and "isGateway" not in made:
        made["isGateway"] = True
    for name in PASSED_ON:
        if name in config:
            made[name] = config[name]
    made["ipam"] = _ipam(config, env)
    return made


def _ipam(config: Mapping[str, object], env: Mapping[str, str]) -> dict[str, object]:
    ipam = dict(fields.part(config, "ipam"))
    ipam.setdefault("type", "host-local")
    subnets = [env[name] for name in ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET") if env.get(name)]
    ranges = []
    for subnet in subnets:
        network = fields.network(subnet, "FLANNEL_SUBNET")
        ranges.append([{"subnet": str(type(network)(network.first, network.prefix))}])
    ipam["ranges"] = ranges
    names = ("FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK")
    networks = [one for name in names for one in env.get(name, "").split(",") if one]
    given = list(fields.objects(ipam, "routes", "ipam."))
    ipam["routes"] = given + [{"dst": one} for one in networks if not any(each.get("dst") == one for each in given)]
    return ipam


def as_request(request: CniRequest, config: Mapping[str, object]) -> CniRequest:
    """Return the request with a delegate's configuration. Raises CniError."""
    plugin = fields.text(config, "type")
    if not plugin or "/" in plugin or "\0" in plugin or plugin in (".", "..", "flannel"):
        raise fields.wrong("delegate.type", f"{plugin[:64]!r} is not a plugin to delegate to")
    named: dict[str, object] = {name: getattr(request, name) for name in request._fields}
    named.update(plugin=plugin, config=config, stdin=write(config).encode())
    return type(request)(**named)  # type: ignore[arg-type]


def delegate_request(request: CniRequest) -> CniRequest:
    """Return the delegate's request for ADD, CHECK, or STATUS. Raises CniError, also if `subnet.env` does not exist yet."""
    path = subnet_file_of(request)
    data = files.read(path)
    if data is None:
        message = f"loadFlannelMapping[str, str] failed: open {path}: no such file or directory"
        raise CniError(CANNOT_ADD, message, "the overlay daemon is not running here, or has not finished its start-up")
    env = read_subnet_env(data.decode("utf-8", "replace"), path)
    return as_request(request, delegate_config(request, env))


def save(request: CniRequest, made: CniRequest) -> None:
    """Save the delegate's configuration, for a DEL without `subnet.env`. Raises OSError."""
    directory, _, name = saved_file_of(request).rpartition("/")
    files.write(directory, name, write(dict(made.config)).encode())


def saved(request: CniRequest) -> CniRequest | None:
    """Return the delegate's request for DEL from the saved configuration; None if there is none. Raises CniError."""
    config = parse_object(files.read(saved_file_of(request)))
    if config is None:
        return None
    for name in PASSED_ON:
        if name in request.config:
            config[name] = request.config[name]
    return as_request(request, config)


def forget(request: CniRequest) -> None:
    """Remove the saved configuration, also one that is not completely written. Raises CniError, OSError."""
    files.remove(f"{data_dir_of(request)}/.{request.container}")
    files.remove(saved_file_of(request))


def collect(request: CniRequest) -> None:
    """Remove the network's saved configurations without a valid attachment (GC). Raises CniError, OSError."""
    valid = {container for container, _ in valid_attachments(request)}
    directory = data_dir_of(request)
    for name in (*files.names(directory), *(f".{container}" for container in files.unfinished(directory))):
        config = parse_object(files.read(f"{directory}/{name}"))
        if name.removeprefix(".") not in valid and config is not None and config.get("name") == request.network:
            files.remove(f"{directory}/{name}")
