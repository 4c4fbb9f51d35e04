"""Delegation to other plugins, as specified: found in CNI_PATH, same environment, configuration on standard input."""

from __future__ import annotations

import os
import subprocess

from narthex.cni import fields, result
from narthex.cni.errors import INVALID_CONFIG, OTHER, CniError
from narthex.cni.json import JsonError, parse, parse_object
from narthex.cni.keys import spelled_as_documented
from narthex.cni.request import ipam_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.request import CniRequest
    from narthex.cni.result import CniResult

_PATIENCE_SECONDS = 60.0


def run(request: CniRequest, plugin: str) -> bytes:
    """Run a plugin with the unchanged request; return its output. Raises CniError, with the plugin's own code if it fails."""
    asked = request.command, request.container, request.namespace, request.interface, request.args, request.path
    return execute(plugin, environment(*asked), request.stdin)


def execute(plugin: str, variables: Mapping[str, str], stdin: bytes) -> bytes:
    """Run a plugin from the CNI_PATH of its environment; return its output. Raises CniError."""
    program = find(variables["CNI_PATH"], plugin)
    try:
        done = subprocess.run(
            [program],
            input=stdin,
            capture_output=True,
            env={"PATH": os.environ.get("PATH", os.defpath), **variables},
            check=False,
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CniError(OTHER, f"cannot run plugin {plugin} ({program}): {error}") from None
    if done.returncode != 0:
        raise _failure(plugin, done.stdout, done.stderr)
    return done.stdout


def addresses(request: CniRequest) -> CniResult:
    """Run the ADD of an IPAM plugin, and its DEL if that fails. Raises CniError."""
    plugin = ipam_of(request.config)
    try:
        return result_of(run(request, plugin), plugin)
    except CniError:
        undo(request, plugin)
        raise


def undo(request: CniRequest, plugin: str) -> None:
    """Run the DEL of a plugin after its ADD failed; errors are ignored."""
    named: dict[str, object] = {name: getattr(request, name) for name in request._fields} | {"command": "DEL"}
    try:
        run(type(request)(**named), plugin)  # type: ignore[arg-type]
    except CniError:
        return


def result_of(answer: bytes, plugin: str) -> CniResult:
    """Parse the result of a plugin's ADD. Raises CniError."""
    return result.read(object_of(answer, plugin), f"the result of {plugin}: ")


def object_of(answer: bytes, plugin: str) -> dict[str, object]:
    """Parse the object on a plugin's standard output. Raises CniError."""
    try:
        data = spelled_as_documented(parse(answer))
    except JsonError as error:
        raise CniError(OTHER, f"plugin {plugin} returned invalid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CniError(OTHER, f"plugin {plugin} did not return an object")
    return data


def find(path: str, plugin: str) -> str:
    """Return the path of a plugin's program in a CNI_PATH. Raises CniError."""
    if not plugin or "/" in plugin or "\0" in plugin or plugin in (".", ".."):
        raise CniError(INVALID_CONFIG, f"type: {plugin[:64]!r} is not a plugin's name")
    for directory in path.split(":"):
        program = f"{directory}/{plugin}"
        if directory.startswith("/") and os.access(program, os.X_OK):
            return program
    raise CniError(INVALID_CONFIG, f"failed to find plugin {plugin[:64]!r} in path {path[:256]!r}")


def environment(
    command: str, container: str, namespace: str, interface: str, args: Mapping[str, str], path: str
) -> dict[str, str]:
    """Return the environment of a plugin."""
    return {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container,
        "CNI_NETNS": namespace,
        "CNI_IFNAME": interface,
        "CNI_ARGS": ";".join(f"{key}={value}" for key, value in args.items()),
        "CNI_PATH": path,
    }


def _failure(plugin: str, answer: bytes, complaint: bytes) -> CniError:
    try:
        data = spelled_as_documented(parse_object(answer))
        if isinstance(data, dict):
            code = fields.whole(data, "code", 1, 1 << 31)
            return CniError(code or OTHER, fields.text(data, "msg"), fields.text(data, "details"))
    except CniError:
        pass
    words = (answer or complaint).decode("utf-8", "replace").strip()[:512]
    return CniError(OTHER, f"plugin {plugin} failed: {words or 'no message'}")
