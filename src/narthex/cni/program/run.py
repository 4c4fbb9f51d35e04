"""One call of a plugin, from the environment and standard input to what is printed. For the agent and without it."""

from __future__ import annotations

from narthex.cni import request as requests
from narthex.cni import result as results
from narthex.cni.errors import INVALID_ENVIRONMENT, OTHER, CniError
from narthex.cni.json import write
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
    """Do what a runtime asks: what to print, and the exit status. Never raises for anything that is asked.

    `node` is one that begins this request, to be used for others as well; without it there is one for this call.
    """
    used = node or NodeContext(state)
    version = NEWEST
    try:
        if plugin not in PLUGINS:
            raise CniError(INVALID_ENVIRONMENT, f"there is no plugin {plugin[:64]!r}; there are {', '.join(PLUGINS)}")
        if environment.get("CNI_COMMAND") == "VERSION":
            return write({"cniVersion": NEWEST, "supportedVersions": list(VERSIONS)}), 0
        asked = requests.read(plugin, environment, stdin)
        version = asked.version
        return _done(used, asked), 0
    except CniError as error:
        return write(error.to_json(_version_for_errors(stdin, version))), 1
    except Exception as error:
        # Whatever goes wrong, a runtime can read only this form. What a socket still holds must not answer another.
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


def _done(node: NodeContext, asked: CniRequest) -> str:
    if asked.command == "ADD":
        return write(_add(node, asked))
    _work(node, asked)
    return ""


def _add(node: NodeContext, asked: CniRequest) -> Mapping[str, object]:
    """The result of an ADD, as the object to print."""
    if asked.plugin == "flannel":
        return _add_flannel(node, asked)
    if asked.plugin == "portmap":
        from narthex.cni.program import ports

        ports.add(node, asked)
        return _passed_on(asked)
    if asked.plugin == "host-local":
        from narthex.cni.program import ipam as addresses

        requests.check_arguments(asked, ("IP", "MAC"))
        return results.write(addresses.add(node, asked), asked.version)
    from narthex.cni.program import pods

    if asked.plugin == "loopback":
        made = pods.add_loopback(node, asked)
        return _passed_on(asked) if asked.config.get("prevResult") is not None else results.write(made, asked.version)
    return results.write(_add_pod(node, asked), asked.version)


def _add_pod(node: NodeContext, asked: CniRequest) -> CniResult:
    from narthex.cni.program import pods

    return pods.add_bridge(node, asked) if asked.plugin == "bridge" else pods.add_ptp(node, asked)


def _passed_on(asked: CniRequest) -> Mapping[str, object]:
    """The result of the plugins before, as it came."""
    before = asked.config.get("prevResult")
    return {"cniVersion": asked.version, **before} if isinstance(before, dict) else {"cniVersion": asked.version}


def _add_flannel(node: NodeContext, asked: CniRequest) -> Mapping[str, object]:
    from narthex.cni.program import flannel

    made = flannel.delegate_request(asked)
    flannel.save(asked, made)
    if made.plugin in PLUGINS:
        return _add(node, made)
    from narthex.cni.program import delegate

    try:
        return results.write(delegate.result_of(delegate.run(made, made.plugin), made.plugin), asked.version)
    except CniError:
        delegate.undo(made, made.plugin)
        raise


_USUAL = {"DEL": "remove", "CHECK": "check", "GC": "collect", "STATUS": "status"}
WORK = {
    "bridge": ("pods", _USUAL),
    "ptp": ("pods", _USUAL),
    "portmap": ("ports", _USUAL),
    "host-local": ("ipam", _USUAL),
    "loopback": ("pods", {"DEL": "remove_loopback", "CHECK": "check_loopback"}),
}
"""Which module does a plugin's work beside ADD, and by which functions of (node, request). It is loaded when it is asked for;
a command without a function has nothing to do."""


def _work(node: NodeContext, asked: CniRequest) -> None:
    """DEL, CHECK, GC and STATUS."""
    if asked.plugin == "flannel":
        _work_flannel(node, asked)
        return
    module, functions = WORK[asked.plugin]
    name = functions.get(asked.command)
    if name is not None:
        # importlib would have to be loaded first.
        getattr(__import__(f"narthex.cni.program.{module}", None, None, (name,)), name)(node, asked)


def _work_flannel(node: NodeContext, asked: CniRequest) -> None:
    """The same as asked of whom flannel delegates to."""
    from narthex.cni.program import flannel

    if asked.command == "CHECK":
        # The delegate's result is not ours to compare: as with the original, nothing is looked at.
        return
    made = flannel.saved(asked) if asked.command == "DEL" else flannel.delegate_request(asked)
    if made is not None and made.plugin in PLUGINS:
        _work(node, made)
    elif made is not None:
        from narthex.cni.program import delegate

        delegate.run(made, made.plugin)
    if asked.command == "DEL":
        flannel.forget(asked)
    elif asked.command == "GC":
        flannel.collect(asked)
