"""Commands to a lab's process over a Unix socket in its directory: one line of JSON each.

    {"settle": true}                                                    wait until everything is in force
    {"scale": {"namespace": "default", "name": "web", "replicas": 3}}   scale a Deployment and wait
    {"kill": {"node": "node-2"}}                                        kill a node
    {"fault": {...}}                                                    see `FaultRequests.handle`
    {"record": {"begin": PATH}}  {"record": {"end": true}}              start or stop recording the history
    {"objects": true}                                                   return the API's objects
    {"close": true}                                                     write kept objects before the process ends

The response is a line of JSON, too: `{}`, a result, or `{"error": "..."}`.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.program.lab_process import LabProcess
from narthex.lab.program.shared_registry import registered_objects
from narthex.lab.program.state import LabError, StateDirectory

Object = dict[str, Any]


def _settle(lab: LabProcess, request: Any) -> Object:
    del request
    lab.settle()
    return {}


def _scale(lab: LabProcess, request: Any) -> Object:
    lab.scale(**request)
    lab.settle()
    return {}


def _kill(lab: LabProcess, request: Any) -> Object:
    # No settling: users who kill a node want to watch the consequences.
    lab.kill(**request)
    return {}


def _close(lab: LabProcess, request: Any) -> Object:
    del request
    lab.close()
    return {}


def _record(lab: LabProcess, request: Any) -> Object:
    controllers = lab.parts.controllers
    if "begin" in request:
        path = controllers.start_recording(Path(request["begin"]), lab.state.name, lab.faults.injector.active)
    else:
        path = controllers.stop_recording()
    return {"path": str(path)}


def _objects(lab: LabProcess, request: Any) -> Object:
    # By this way a trace has the objects while the API server is away.
    del request
    with lab.parts.registry.held() as registry:
        return {"objects": registered_objects(registry)}


_HANDLERS: Mapping[str, Callable[[LabProcess, Any], Object]] = {
    "settle": _settle,
    "scale": _scale,
    "kill": _kill,
    "close": _close,
    "fault": lambda lab, request: lab.faults.handle(request),
    "record": _record,
    "objects": _objects,
}


def listen(lab: LabProcess, directory: StateDirectory) -> None:
    """Accept commands from now on, each in a thread of its own. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(directory.control))
    sock.listen()
    threading.Thread(target=_accept, args=(lab, sock), name="control", daemon=True).start()


def _accept(lab: LabProcess, sock: socket.socket) -> None:
    while True:
        connection, _ = sock.accept()
        threading.Thread(target=_serve, args=(lab, connection), name="request", daemon=True).start()


def _serve(lab: LabProcess, connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as stream:
        connection.sendall(msgspec.json.encode(_handle(lab, stream.readline())) + b"\n")


def _handle(lab: LabProcess, line: bytes) -> Object:
    try:
        commands: Object = msgspec.json.decode(line)
        for name, request in commands.items():
            response = _HANDLERS[name](lab, request)
        lab.publish()
    except Exception as error:
        kind = "" if isinstance(error, LabError) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr, flush=True)
        return {"error": f"{kind}{error}"}
    return response
