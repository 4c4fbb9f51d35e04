"""Tracked UDP flows of host ports: those of the time before a mapping, and those to a pod that is gone.

UDP has no end, so an entry of the kernel would lead a client past a new mapping for as long as it keeps sending.
"""

from __future__ import annotations

from narthex.cni.plugins import portmap
from narthex.linux.addresses import own_addresses
from narthex.linux.conntrack import Conntrack
from narthex.model import packed_addresses as address
from narthex.model.net import IPFamily, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.plugins.portmap import PortmapConfig, Target


def forget(config: PortmapConfig, pod: Target, only_to_pod: bool = False) -> int:
    """Remove entries of UDP host ports on this node's addresses; how many there were. `only_to_pod`: those that the
    pod answers, else those that it does not. Raises OSError."""
    removed = 0
    conntrack = Conntrack()
    own = {one.address for one in own_addresses()}
    for ip in pod.ips:
        family = IPFamily.IPV4 if len(ip) == 4 else IPFamily.IPV6
        towards = {
            (Protocol.UDP, one.host_port)
            for one in config.mappings
            if one.protocol == "udp" and portmap.applies(one, ip)
        }
        if not towards:
            continue
        text = address.text(ip)
        stale = [
            entry
            for entry in conntrack.entries(family, towards)
            if (entry.flow.destination in own or entry.flow.destination.startswith("127."))
            and (entry.flow.reply_source == text) is only_to_pod
        ]
        removed += sum(conntrack.remove(family, stale))
    return removed
