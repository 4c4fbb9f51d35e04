"""The plugin `flannel`: reads what the overlay's daemon says of this node, and hands over to another plugin."""

from __future__ import annotations

from narthex.cni.errors import CANNOT_ADD, CniError
from narthex.cni.json import JsonError, parse, write
from narthex.cni.kernel import files
from narthex.cni.plugins import flannel
from narthex.cni.request import valid_attachments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import Request


def delegate(request: Request) -> Request:
    """The call that an ADD, CHECK or STATUS becomes. Raises CniError, also while the daemon has not said anything."""
    path = flannel.subnet_file_of(request)
    data = files.read(path)
    if data is None:
        message = f"loadFlannelSubnetEnv failed: open {path}: no such file or directory"
        raise CniError(CANNOT_ADD, message, "the overlay's daemon is not running here, or has not finished its start")
    env = flannel.read_subnet_env(data.decode("utf-8", "replace"), path)
    return flannel.as_request(request, flannel.delegate(request, env))


def save(request: Request, made: Request) -> None:
    """Keep the delegate's configuration, for a DEL when the daemon is gone. Raises OSError."""
    directory, _, name = flannel.saved_file_of(request).rpartition("/")
    files.write(directory, name, write(dict(made.config)).encode())


def saved(request: Request) -> Request | None:
    """The call that a DEL becomes, by the saved configuration; None when there is none. Raises CniError."""
    data = files.read(flannel.saved_file_of(request))
    if not data:
        return None
    try:
        config = parse(data)
    except JsonError:
        return None
    if not isinstance(config, dict):
        return None
    for name in flannel.PASSED_ON:
        if name in request.config:
            config[name] = request.config[name]
    return flannel.as_request(request, config)


def forget(request: Request) -> None:
    """Drop the saved configuration. Raises CniError, OSError."""
    files.remove(flannel.saved_file_of(request))


def collect(request: Request) -> None:
    """GC: drop the saved configurations of this network's containers that no valid attachment names. Raises CniError,
    OSError."""
    valid = {container for container, _ in valid_attachments(request)}
    directory = flannel.data_dir_of(request)
    for container in files.names(directory):
        if container in valid:
            continue
        try:
            config = parse(files.read(f"{directory}/{container}") or b"")
        except JsonError:
            continue
        if isinstance(config, dict) and config.get("name") == request.network:
            files.remove(f"{directory}/{container}")
