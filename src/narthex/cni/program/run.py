"""One invocation of a plugin, from environment and standard input to its output; used by the agent and by the launcher."""

from __future__ import annotations

from narthex.cni import request as requests
from narthex.cni import result as results
from narthex.cni.errors import INVALID_ENVIRONMENT, OTHER, CniError
from narthex.cni.json import write
from narthex.cni.kernel import locks
from narthex.cni.kernel.records import STATE
from narthex.cni.program.node import NodeContext
from narthex.cni.request import NEWEST, VERSIONS, CniRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.result import CniResult

PLUGINS = ("bridge", "flannel", "host-local", "loopback", "portmap", "ptp")


def answer(
    plugin: str, environment: Mapping[str, str], stdin: bytes, state: str = STATE, node: NodeContext | None = None
) -> tuple[str, int]:
    """Handle a request; return output and exit status. Never raises.

    `node` is a context that has begun this request and is reused; without one, a new one is created.
    """
    used = node or NodeContext(state)
    version = NEWEST
    try:
        if plugin not in PLUGINS:
            raise CniError(INVALID_ENVIRONMENT, f"there is no plugin {plugin[:64]!r}; there are {', '.join(PLUGINS)}")
        if environment.get("CNI_COMMAND") == "VERSION":
            return write({"cniVersion": NEWEST, "supportedVersions": list(VERSIONS)}), 0
        request = requests.read(plugin, environment, stdin)
        version = request.version
        return _dispatch(used, request), 0
    except CniError as error:
        return write(error.to_json(_version_for_errors(stdin, version))), 1
    except Exception as error:
        # A runtime understands only this format. Close the sockets, so that unread data cannot answer another request.
        used.close()
        said = CniError(OTHER, f"{plugin}: {error or type(error).__name__}", type(error).__name__)
        return write(said.to_json(version)), 1
    finally:
        if node is None:
            used.close()
        else:
            used.end()


def _version_for_errors(stdin: bytes, version: str) -> str:
    try:
        return requests.version_of(requests.configuration(stdin))
    except CniError:
        return version


def _dispatch(node: NodeContext, request: CniRequest) -> str:
    if request.command == "ADD":
        return write(_add(node, request))
    _run_command(node, request)
    return ""


def _add(node: NodeContext, request: CniRequest) -> Mapping[str, object]:
    if request.plugin == "flannel":
        return _add_flannel(node, request)
    made = _run_command(node, request)
    if made is None or (request.plugin == "loopback" and request.config.get("prevResult") is not None):
        return _previous_result(request)
    return results.write(made, request.version)


def _previous_result(request: CniRequest) -> Mapping[str, object]:
    """Return the unchanged result of the previous plugins."""
    before = request.config.get("prevResult")
    return {"cniVersion": request.version, **before} if isinstance(before, dict) else {"cniVersion": request.version}


def _add_flannel(node: NodeContext, request: CniRequest) -> Mapping[str, object]:
    from narthex.cni.program import flannel

    made = flannel.delegate_request(request)
    with node.exclusive(locks.FLANNEL, request.attachment):
        return _add_delegate(node, request, made)


def _add_delegate(node: NodeContext, request: CniRequest, made: CniRequest) -> Mapping[str, object]:
    from narthex.cni.program import flannel

    flannel.save(request, made)
    if made.plugin in PLUGINS:
        return _add(node, made)
    from narthex.cni.program import delegate

    try:
        return results.write(delegate.result_of(delegate.run(made, made.plugin), made.plugin), request.version)
    except CniError:
        delegate.undo(made, made.plugin)
        raise


_STANDARD = {"ADD": "add", "DEL": "remove", "CHECK": "check", "GC": "collect", "STATUS": "status"}
COMMAND_HANDLERS = {
    "bridge": ("pod_interfaces", _STANDARD | {"ADD": "add_bridge"}),
    "ptp": ("pod_interfaces", _STANDARD | {"ADD": "add_ptp"}),
    "portmap": ("portmap", _STANDARD),
    "host-local": ("ipam", _STANDARD),
    "loopback": ("pod_interfaces", {"ADD": "add_loopback", "DEL": "remove_loopback", "CHECK": "check_loopback"}),
}
"""For each plugin, the module and the functions of (node, request) for its commands; those for ADD return the result.

The module is loaded on demand; a command without a function does nothing.
"""


def _run_command(node: NodeContext, request: CniRequest) -> CniResult | None:
    if request.command == "GC" and not requests.knows_attachments(request):
        return None
    if request.plugin == "flannel":
        _run_flannel_command(node, request)
        return None
    module, functions = COMMAND_HANDLERS[request.plugin]
    name = functions.get(request.command)
    if name is None:
        return None
    # Avoids the import of importlib.
    return getattr(__import__(f"narthex.cni.program.{module}", None, None, (name,)), name)(node, request)  # type: ignore[no-any-return]


def _run_flannel_command(node: NodeContext, request: CniRequest) -> None:
    from narthex.cni.program import flannel

    if request.command == "CHECK":
        # The result is the delegate's: like the reference plugin, check nothing.
        return
    if request.command == "DEL":
        with node.exclusive(locks.FLANNEL, request.attachment):
            _run_delegate(node, flannel.saved(request))
            flannel.forget(request)
        return
    _run_delegate(node, flannel.delegate_request(request))
    if request.command == "GC":
        flannel.collect(request)


def _run_delegate(node: NodeContext, made: CniRequest | None) -> None:
    if made is not None and made.plugin in PLUGINS:
        _run_command(node, made)
    elif made is not None:
        from narthex.cni.program import delegate

        delegate.run(made, made.plugin)
