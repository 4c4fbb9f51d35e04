"""Masquerading and host ports in iptables, with the chains of the reference plugins, as input for iptables-restore.

Removal is based on the output of `iptables-save`, so that rules of the reference plugins are removed as well.
"""

from __future__ import annotations

from hashlib import sha512

from narthex.cni.plugins import portmap
from narthex.model.values import Network, address_text, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from narthex.cni.plugins.portmap import PortmapConfig, PortmapTarget
    from narthex.cni.result import IPConfig

_LONGEST = 28
_DNAT, _SET_MARK, _MASQUERADE = "CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"


def masquerade_chain(network: str, container: str) -> str:
    """Return the name of a pod's masquerading chain."""
    return _chain("CNI-", network, container)


def ports_chain(network: str, container: str) -> str:
    """Return the name of a pod's host port chain."""
    return _chain("CNI-DN-", network, container)


def _chain(prefix: str, network: str, container: str) -> str:
    return (prefix + sha512(f"{network}{container}".encode()).hexdigest())[:_LONGEST]


def masquerade(network: str, container: str, ips: Iterable[IPConfig], family: int) -> str:
    """Return the input that masquerades a pod's addresses of a family; empty if it has none."""
    mine = [ip for ip in ips if ip_version(ip.network.address) == family]
    if not mine:
        return ""
    chain = masquerade_chain(network, container)
    comment = _comment(network, container)
    multicast = "224.0.0.0/4" if family == 4 else "ff00::/8"
    lines = [f":{chain} - [0:0]"]
    for ip in mine:
        lines += [
            f"-A {chain} -d {Network(ip.network.first, ip.network.prefix)} {comment} -j ACCEPT",
            f"-A {chain} ! -d {multicast} {comment} -j MASQUERADE",
            f"-A POSTROUTING -s {address_text(ip.network.address)} {comment} -j {chain}",
        ]
    return _table(lines)


def ports(network: str, container: str, config: PortmapConfig, pod: PortmapTarget, family: int, listed: str) -> str:
    """Return the input that opens a pod's host ports of a family; empty if it has none. `listed` is the current table."""
    ip = next((one for one in pod.ips if ip_version(one) == family), b"")
    mappings = [one for one in config.mappings if portmap.applies(one, ip)] if ip else []
    if not mappings:
        return ""
    chain, comment = ports_chain(network, container), _comment(network, container, "dnat name")
    subnet = next(one for one in pod.subnets if (":" in one) == (family == 6))
    conditions = "".join(f' "{word}"' for word in config.conditions[family == 6])
    lines = [*_frame(config, listed), f":{chain} - [0:0]"]
    for mapping in mappings:
        match = f"-p {mapping.protocol} -m {mapping.protocol} --dport {mapping.host_port}"
        if any(mapping.host_ip):
            match += f" -d {address_text(mapping.host_ip)}"
        mark = f"-j {config.set_mark_chain or _SET_MARK}"
        if config.masquerade_all:
            lines.append(f"-A {chain} {match} {mark}")
        elif config.snat:
            lines.append(f"-A {chain} {match} -s {subnet} {mark}")
            if family == 4:
                lines.append(f"-A {chain} {match} -s 127.0.0.1/32 {mark}")
        aim = address_text(ip) if family == 4 else f"[{address_text(ip)}]"
        lines.append(f"-A {chain} {match} -j DNAT --to-destination {aim}:{mapping.port}")
    for protocol in dict.fromkeys(one.protocol for one in mappings):
        numbers = ",".join(str(one.host_port) for one in mappings if one.protocol == protocol)
        # multiport is limited to 15 ports; the pod's chain matches exactly.
        few = f" -m multiport --dports {numbers}" if numbers.count(",") < 15 else ""
        lines.append(f"-A {_DNAT} -p {protocol} {comment}{few}{conditions} -j {chain}")
    return _table(lines)


def _frame(config: PortmapConfig, listed: str) -> list[str]:
    """Return the missing chains that all pods share."""
    has = set(listed.splitlines())
    lines = []
    if not any(line.startswith(f":{_DNAT} ") for line in has):
        lines.append(f":{_DNAT} - [0:0]")
    jump = f"-m addrtype --dst-type LOCAL -j {_DNAT}"
    jumps = [f"-A {base} {jump}" for base in ("PREROUTING", "OUTPUT")]
    lines += [line for line in jumps if line not in has]
    if config.snat and not config.set_mark_chain:
        mark = f"0x{1 << config.masq_bit:x}"
        if not any(line.startswith(f":{_SET_MARK} ") for line in has):
            lines += [f":{_SET_MARK} - [0:0]", f":{_MASQUERADE} - [0:0]"]
            lines.append(f'-A {_SET_MARK} -m comment --comment "CNI portfwd masquerade mark" -j MARK --or-mark {mark}')
            lines.append(f"-A {_MASQUERADE} -m mark --mark {mark}/{mark} -j MASQUERADE")
        if not any(line.startswith("-A POSTROUTING ") and line.endswith(f"-j {_MASQUERADE}") for line in has):
            comment = '-m comment --comment "CNI portfwd requiring masquerade"'
            lines.append(f"-I POSTROUTING 1 {comment} -j {_MASQUERADE}")
    return lines


def removal(chain: str, listed: str) -> str:
    """Return the input that removes a pod's chain and all jumps to it; empty if it does not exist."""
    lines = listed.splitlines()
    if not any(line.startswith(f":{chain} ") for line in lines):
        return ""
    leading = [f"-D {line[3:]}" for line in lines if line.startswith("-A ") and line.endswith(f" -j {chain}")]
    return _table([*leading, f"-F {chain}", f"-X {chain}"])


def holders(listed: str, config: PortmapConfig, own: str) -> list[tuple[str, str]]:
    """Return the configured host ports that other pods' chains have: description of the port, and chain."""
    found = []
    for mapping in config.mappings:
        match = f"-p {mapping.protocol} -m {mapping.protocol} --dport {mapping.host_port} "
        for line in listed.splitlines():
            words = line.split()
            if line.startswith("-A CNI-DN-") and match in line and "DNAT" in words and words[1] != own:
                bound = words[words.index("-d") + 1].partition("/")[0] if "-d" in words else ""
                if bound == (address_text(mapping.host_ip) if any(mapping.host_ip) else ""):
                    found.append((str(mapping), words[1]))
    return found


def has_rule(chain: str, listed: str) -> bool:
    """Return True if something jumps to the chain."""
    return any(line.startswith("-A ") and line.endswith(f" -j {chain}") for line in listed.splitlines())


def container_of(chain: str, listed: str) -> str:
    """Return the container in the comment of the chain's jump, or the chain's name."""
    for line in listed.splitlines():
        if line.endswith(f" -j {chain}") and 'id: \\"' in line:
            return line.partition('id: \\"')[2].partition('\\"')[0]
    return chain


def _comment(network: str, container: str, what: str = "name") -> str:
    return f'-m comment --comment "{what}: \\"{network}\\" id: \\"{container}\\""'


def _table(lines: list[str]) -> str:
    return "\n".join(["*nat", *lines, "COMMIT", ""])
