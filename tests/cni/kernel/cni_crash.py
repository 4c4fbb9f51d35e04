"""Ends a plugin at each of its effects, one after another, and looks at what the next call makes of it.

    python cni_crash.py SCRATCH NAMESPACE

Runs in a node's network namespace; NAMESPACE is a pod's. Prints how many places there were, and what was wrong.
"""

import os
import posix
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narthex.cni.json import parse, write
from narthex.cni.program import run
from narthex.linux.netlink import Netlink
from narthex.linux.rtnetlink import RtNetlink

SCRATCH, POD = Path(sys.argv[1]), sys.argv[2]
STATE = str(SCRATCH / "state")


def config(plugin: str, before: Any = None) -> dict[str, Any]:
    ipam = {"type": "host-local", "dataDir": str(SCRATCH / "networks"), "ranges": [[{"subnet": "10.77.0.0/29"}]]}
    common = {"cniVersion": "1.1.0", "name": "net", "type": plugin, "prevResult": before}
    if plugin == "portmap":
        return common | {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
    return common | {"isGateway": True, "ipMasq": True, "ipam": ipam}


def call(command: str, plugin: str, before: Any = None, container: str = "a") -> tuple[int, Any]:
    environment = {"CNI_COMMAND": command, "CNI_CONTAINERID": container, "CNI_NETNS": POD, "CNI_IFNAME": "eth0"}
    text, status = run.answer(plugin, environment, write(config(plugin, before)).encode(), STATE)
    return status, parse(text.encode()) if text else None


def good(*arguments: Any) -> Any:
    status, said = call(*arguments)
    assert status == 0, (arguments, said)
    return said


def chain_add() -> Any:
    return good("ADD", "portmap", good("ADD", "bridge"))


def chain_delete(before: Any = None) -> None:
    good("DEL", "portmap", before)
    good("DEL", "bridge", before)


def killed_at(place: int, work: Callable[[], object]) -> bool:
    """Do the work in a child that is killed before its effect number `place`; whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [place]

        def watched(effect: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*arguments: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return effect(*arguments, **named)

            return instead

        for name in ("open", "write", "rename", "unlink", "mkdir", "pwrite"):
            setattr(posix, name, watched(getattr(posix, name)))
        setattr(Netlink, "_send", watched(Netlink._send))  # noqa: B010
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def left_over() -> list[str]:
    """What is still there of the attachment."""
    links = RtNetlink()
    found = [link.name for link in links.links() if link.name.startswith("veth")]
    links.close()
    found += [path.name for path in SCRATCH.glob("networks/net/10.*")]
    found += [path.name for kind in ("pods", "ports", "masquerade") for path in SCRATCH.glob(f"state/{kind}/*")]
    return found


def in_add() -> int:
    """Killed in ADD: the runtime sends DEL, and then a new ADD works."""
    place = 0
    while True:
        place += 1
        went = killed_at(place, chain_add)
        if not went:
            chain_delete()
            return place
        chain_delete()
        assert left_over() == [], (place, left_over())
        chain_delete(chain_add())
        assert left_over() == [], (place, left_over())


def in_delete() -> int:
    """Killed in DEL: the runtime sends it again."""
    place = 0
    while True:
        place += 1
        before = chain_add()
        if not killed_at(place, lambda: chain_delete(before)):  # noqa: B023
            assert left_over() == [], (place, left_over())
            return place
        chain_delete(before)
        assert left_over() == [], (place, left_over())


print(in_add(), in_delete())
