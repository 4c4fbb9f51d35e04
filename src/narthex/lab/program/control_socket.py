"""Questions of other processes to a lab's: one line of JSON each, by a socket in its directory.

    {"settle": true}                                                    wait until all is in force
    {"scale": {"namespace": "default", "name": "web", "replicas": 3}}   another number of pods, and wait
    {"kill": {"node": "node-2"}}                                        let a node die
    {"fault": {…}}  {"record": {…}}                                     see troubles.py
    {"close": true}                                                     write what is kept: the end is near

The answer is a line, too: `{}`, or `{"error": "…"}`. Whoever adds a question adds it to `_ANSWERS`.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from narthex.lab.program.lab_process import LabProcess
from narthex.lab.program.state import LabError, StateDirectory

Object = dict[str, Any]


def _settle(lab: LabProcess, content: Any) -> Object:
    del content
    lab.settle()
    return {}


def _scale(lab: LabProcess, content: Any) -> Object:
    lab.scale(**content)
    lab.settle()
    return {}


def _kill(lab: LabProcess, content: Any) -> Object:
    # Who kills a node wants to see what follows, and not wait until it is over.
    lab.kill(**content)
    return {}


def _close(lab: LabProcess, content: Any) -> Object:
    del content
    lab.close()
    return {}


_ANSWERS: Mapping[str, Callable[[LabProcess, Any], Object]] = {
    "settle": _settle,
    "scale": _scale,
    "kill": _kill,
    "close": _close,
    "fault": lambda lab, content: lab.troubles.answer_fault(content),
    "record": lambda lab, content: lab.troubles.answer_record(content),
}


def listen(lab: LabProcess, directory: StateDirectory) -> None:
    """Answer from now on, each question in a thread of its own. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(directory.control))
    sock.listen()
    threading.Thread(target=_accept, args=(lab, sock), name="control", daemon=True).start()


def _accept(lab: LabProcess, sock: socket.socket) -> None:
    while True:
        connection, _ = sock.accept()
        threading.Thread(target=_converse, args=(lab, connection), name="request", daemon=True).start()


def _converse(lab: LabProcess, connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as stream:
        connection.sendall(msgspec.json.encode(_answer(lab, stream.readline())) + b"\n")


def _answer(lab: LabProcess, line: bytes) -> Object:
    try:
        question: Object = msgspec.json.decode(line)
        for name, content in question.items():
            answer = _ANSWERS[name](lab, content)
        lab.publish()
    except Exception as error:
        kind = "" if isinstance(error, LabError) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr, flush=True)
        return {"error": f"{kind}{error}"}
    return answer
