"""What this process may do to the network namespace it is in, and what the machine brings: tools, kernel."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from pathlib import Path

from narthex.linux.run import run
from narthex.model.net import IPFamily

_CAP_NET_ADMIN = 12

_TOOLS = {
    ("nftables", IPFamily.IPV4): ("nft",),
    ("nftables", IPFamily.IPV6): ("nft",),
    ("iptables", IPFamily.IPV4): ("iptables-save", "iptables-restore"),
    ("iptables", IPFamily.IPV6): ("ip6tables-save", "ip6tables-restore"),
    ("ipvs", IPFamily.IPV4): ("iptables-save", "iptables-restore", "ipset"),
    ("ipvs", IPFamily.IPV6): ("ip6tables-save", "ip6tables-restore", "ipset"),
    ("userspace", IPFamily.IPV4): ("iptables-save", "iptables-restore"),
    ("userspace", IPFamily.IPV6): ("ip6tables-save", "ip6tables-restore"),
}


def may_change_network(status: Path = Path("/proc/thread-self/status")) -> bool:
    """Whether the calling thread has CAP_NET_ADMIN (root has it, also root of a user namespace)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_NET_ADMIN & 1)


def kernel_release() -> tuple[int, int]:
    """Major and minor version of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def nft_release() -> tuple[int, ...]:
    """The version of the nft that is installed, such as (1, 0, 6); () when it does not say."""
    match = re.search(r"\bv(\d+)\.(\d+)(?:\.(\d+))?", run(["nft", "--version"]))
    return tuple(int(number or 0) for number in match.groups()) if match else ()


def allow_many_files() -> None:
    """Let this process open as many files as it is entitled to. The usual 1024 are a limit of `select`, which nobody
    here uses, and each health check node port takes one for each address."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def missing_tools(mode: str, family: IPFamily) -> tuple[str, ...]:
    """The programs that a mode needs for a family and that are not on the PATH."""
    return tuple(tool for tool in _TOOLS.get((mode, family), ()) if shutil.which(tool) is None)


_OWN = Path("/proc/self/oom_score_adj")


def set_oom_score(score: int, path: Path = _OWN) -> None:
    """-1000 is never, 1000 is first. Raises OSError; to go below the present value takes CAP_SYS_RESOURCE."""
    path.write_text(f"{score}\n")


_STEPS = -10


def go_first() -> bool:
    """Be given the processor before programs that calculate, for one that works for microseconds and is waited for. False:
    this process may not (CAP_SYS_NICE), and waits its turn."""
    try:
        os.nice(_STEPS)
    except OSError:
        return False
    return True
