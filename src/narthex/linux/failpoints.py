"""Failpoints: named places between two writes, at which a test ends the process as `kill -9` would.

Off unless the environment variable NARTHEX_FAILPOINT names a point when the program starts: `NAME`, or `NAME=N` for the N-th
time that the point is passed. Fast to import; a point that is off costs one comparison.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT = "NARTHEX_FAILPOINT"
_SIGKILL = 9

FILE_UNFINISHED = "cni.file.unfinished"
FILE_WRITTEN = "cni.file.written"
FILE_REMOVED = "cni.file.removed"
CNI_ELEMENTS = "cni.elements.committed"
CNI_TABLE = "cni.table.created"
CNI_LINKS = "cni.links.changed"
CNI_IPTABLES = "cni.iptables.restored"
NFT_SCRIPT = "proxy.nftables.script"
NFT_ELEMENTS = "proxy.nftables.elements"
NFT_REMOVED = "proxy.nftables.removed"
IPTABLES_GIVEN = "proxy.iptables.given"
IPTABLES_RESTORED = "proxy.iptables.restored"
IPVS_BOUND = "proxy.ipvs.bound"
IPVS_SETS = "proxy.ipvs.sets"
IPVS_TABLES = "proxy.ipvs.tables"
IPVS_SERVERS = "proxy.ipvs.servers"
IPVS_ENTRIES = "proxy.ipvs.entries"
IPVS_DESTROYED = "proxy.ipvs.destroyed"
TAKEOVER_OWNED = "lb.takeover.owned"
TAKEOVER_LISTENING = "lb.takeover.listening"
TAKEOVER_PUBLISHED = "lb.takeover.published"
TAKEOVER_SENT = "lb.takeover.sent"
TAKEOVER_ANNOUNCED = "lb.takeover.announced"
POINTS = {
    FILE_UNFINISHED: "a record, reservation, or configuration is written under its temporary name",
    FILE_WRITTEN: "it has its final name",
    FILE_REMOVED: "it is removed",
    CNI_ELEMENTS: "the kernel has set elements of one attachment added or removed",
    CNI_TABLE: "the kernel has an empty table of the plugins",
    CNI_LINKS: "the kernel has made or removed the node's links of an attachment",
    CNI_IPTABLES: "iptables-restore has changed the rules of one family for an attachment",
    NFT_SCRIPT: "the kernel has new chains and sets of the proxy, but not their elements",
    NFT_ELEMENTS: "the kernel has the elements of the proxy, and also what is no longer used",
    NFT_REMOVED: "the kernel has all changes of one family, but the proxy has not noted it",
    IPTABLES_GIVEN: "iptables-restore was given one table or piece of several, which it may have committed or not",
    IPTABLES_RESTORED: "the kernel has all tables of one family",
    IPVS_BOUND: "new addresses are on kube-ipvs0, without virtual servers",
    IPVS_SETS: "new sets and entries exist",
    IPVS_TABLES: "the chains that name the sets exist",
    IPVS_SERVERS: "virtual servers and real servers are changed",
    IPVS_ENTRIES: "entries that are no longer used are removed",
    IPVS_DESTROYED: "so are sets, but not addresses",
    TAKEOVER_OWNED: "the announcer has decided to answer for an address",
    TAKEOVER_LISTENING: "it receives requests for the address",
    TAKEOVER_PUBLISHED: "its next heartbeat has the address",
    TAKEOVER_SENT: "the other announcers were sent that heartbeat, and the neighbors nothing",
    TAKEOVER_ANNOUNCED: "one address was announced to the neighbors once",
}
"""All points, and what has been done when they are passed."""

_armed: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Pass a point, which ends the process if a test has asked for it."""
    if _armed is not None:
        _armed(name)


def arm(name: str, times: int = 1) -> None:
    """Kill this process when it passes a point for the given time. Raises ValueError if there is no such point."""
    if name not in POINTS:
        raise ValueError(f"there is no failpoint {name!r}; there are {', '.join(POINTS)}")
    left = [times]

    def passed(at: str) -> None:
        """Count down the visits of the armed failpoint; kill this process with SIGKILL at the last one."""
        left[0] -= at == name
        if not left[0]:
            posix.kill(posix.getpid(), _SIGKILL)

    watch(passed)


def watch(passed: Callable[[str], None] | None) -> None:
    """Call a function at each point that is passed, instead of what was called before; None switches the points off."""
    global _armed
    _armed = passed


def _read(value: bytes) -> None:
    """Arm the point of the environment variable; a name that does not exist is an error of a test, which must not stay unseen."""
    name, _, times = value.decode("ascii", "replace").partition("=")
    arm(name, int(times or 1))


if (_value := posix.environ.get(ENVIRONMENT.encode())) is not None:
    _read(_value)
