"""Finds the rules that Narthex or kube-proxy left in a kernel, of any mode and version.

Rules of others are never touched. Leftovers are recognized by name: tables, and the chains that some version of
kube-proxy made (rows 22.1, 24.3, 25.2). In chains of others, only jumps of a known form belong to them. Chains that a
kubelet maintains (row 22.9) are not leftovers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import pairwise

import msgspec

from narthex.model import IPFamily
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import ServerKey
from narthex.netfilter.xtables.lexer import ValueWord, split_words
from narthex.netfilter.xtables.parse import parse_rules
from narthex.netfilter.xtables.values import builtin_chains
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.frame import guard_rule
from narthex.proxy.backends.ipvs.names import IPVS_CHAINS
from narthex.proxy.backends.nftables.frame import TABLE
from narthex.proxy.backends.userspace.names import USERSPACE_CHAINS

KUBE_PROXY_TABLE = "kube-proxy"
_IPSET = re.compile(
    r"KUBE-(6-)?(LOOP-BACK|CLUSTER-IP|EXTERNAL-IP(-LOCAL)?|LOAD-BALANCER(-FW|-LOCAL|-SOURCE-IP|-SOURCE-CIDR?)?"
    r"|IPVS-IPS|NODE-PORT-(LOCAL-)?(TCP|UDP|SCTP-HASH?)|HEALTH-CHECK-NODE-PORT|DROP-(POD|NODE|OTHER))",
    re.ASCII,
)
"""Names of row 24.4 and of Narthex. Two lose their last letter, because names of sets are limited to 31 characters."""
_NODE_PORT_SET = re.compile(r"KUBE-(6-)?NODE-PORT-(LOCAL-)?(TCP|UDP|SCTP-HASH?)", re.ASCII)

_MODES = (names.IPTABLES_CHAINS, IPVS_CHAINS, USERSPACE_CHAINS)
_OLD_CHAINS = {"nat": {"KUBE-MARK-DROP", "KUBE-FIREWALL"}}
"""Chains of no present mode. The ipvs of old had its KUBE-FIREWALL in nat; kubelet's is in filter."""
_JUMP_MATCHES = {
    ("-m", "comment"),
    ("-m", "conntrack"),
    ("--ctstate", "NEW"),
    ("-m", "state"),
    ("--state", "NEW"),
    ("-m", "addrtype"),
    ("--dst-type", "LOCAL"),
}

_SHARED_GUARD = (
    "another program has rules in it, so the chain and the jumps to it stay; the guard of 127.0.0.0/8 is removed"
)
_KUBELETS_GUARD = (
    "a kubelet has rules in it, and the guard of 127.0.0.0/8 may be the kubelet's, so both stay; to remove the guard, too, "
    "delete the rule `block incoming localnet connections` and set net.ipv4.conf.all.route_localnet to 0"
)
Owned = Callable[[str, str], bool]
"""Returns True if a chain, given by table and name, is to be removed."""


def is_leftover_table(name: str) -> bool:
    """Return True for a table of mode nftables, of Narthex or kube-proxy."""
    return name in (TABLE, KUBE_PROXY_TABLE)


def is_leftover_chain(table: str, chain: str) -> bool:
    """Return True for a chain that Narthex or kube-proxy made with iptables."""
    return chain in _OLD_CHAINS.get(table, ()) or any(mode.is_ours(table, chain) for mode in _MODES)


def is_leftover_set(name: str) -> bool:
    """Return True for an ipset of mode ipvs."""
    return _IPSET.fullmatch(name) is not None


def set_family(name: str) -> IPFamily:
    """Return the family of the addresses in an ipset of kube-proxy."""
    return IPFamily.IPV6 if name.startswith("KUBE-6-") else IPFamily.IPV4


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be removed from one iptables table."""

    table: str
    chains: tuple[str, ...] = ()
    jumps: tuple[tuple[str, str], ...] = ()
    """Built-in chain and rule. The text is the tool's own, because only this text reliably identifies the rule."""
    kept: Mapping[str, str] = {}
    """Chains that rules of others use, with the reason. Everything that these chains use stays as well."""
    guard: bool = False
    """The guard of route_localnet (row 9.11) is removed, with its chain or without."""

    def __bool__(self) -> bool:
        return bool(self.chains or self.jumps or self.kept)

    @property
    def script(self) -> str:
        """Input for `iptables-restore --noflush`; empty if there is nothing to remove."""
        if not self.chains and not self.jumps:
            return ""
        lines = [f"*{self.table}", *(f":{chain} - [0:0]" for chain in self.chains)]
        lines += (f"-D {chain} {rule}" for chain, rule in self.jumps)
        lines += (f"-X {chain}" for chain in self.chains)
        return "\n".join([*lines, "COMMIT", ""])


def has_kubelet(chains: Iterable[tuple[str, str]]) -> bool:
    """Return True if a kubelet maintains rules in this namespace, according to its tables and chains."""
    return any(table == "mangle" and chain in names.KUBELET_CHAINS for table, chain in chains)


def save_chains(text: str) -> Iterator[tuple[str, str]]:
    """Yield table and name of each chain in the output of iptables-save."""
    return ((table, chain) for table, chains, _ in _saved_tables(text) for chain in chains)


def find(text: str, family: IPFamily, kubelet: bool, owned: Owned = is_leftover_chain) -> list[Leftovers]:
    """Return the leftovers in the output of iptables-save, limited to chains that are `owned`. Raises SaveTextError."""
    found = [_in_table(*saved, family, kubelet, owned) for saved in _saved_tables(text)]
    return [one for one in found if one]


def _saved_tables(text: str) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Yield name, chains, and rules (chain and text) of each table."""
    table = ""
    chains: list[str] = []
    rules: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("*"):
            table, chains, rules = line[1:], [], []
        elif line.startswith(":"):
            chains.append(line[1:].split(" ", 1)[0])
        elif line.startswith("-A "):
            _, chain, *rule = line.split(" ", 2)
            rules.append((chain, "".join(rule)))
        elif line == "COMMIT":
            yield table, chains, rules


def _in_table(
    table: str, chains: list[str], rules: list[tuple[str, str]], family: IPFamily, kubelet: bool, owned: Owned
) -> Leftovers:
    ours = {chain: None for chain in chains if owned(table, chain)}
    jumps, kept = [], {}
    guard = table == "filter" and names.FIREWALL in ours
    inside = [rule for chain, rule in rules if guard and chain == names.FIREWALL]
    guards = [rule for rule in inside if _is_guard(rule, family)]
    shared = len(guards) < len(inside)
    if guard and (kubelet or shared):
        # It is kubelet's, or another program has rules in it.
        del ours[names.FIREWALL]
        guard = False
        if guards and shared:
            kept[names.FIREWALL] = _KUBELETS_GUARD if kubelet else _SHARED_GUARD
            jumps += [(names.FIREWALL, rule) for rule in guards if not kubelet]
    for chain, rule in rules:
        if chain in ours:
            continue
        target = _target(rule)
        if target not in ours:
            continue
        entry = any(target in mode.entries.get(table, ()) for mode in _MODES)
        if entry and chain in builtin_chains(table) and _is_plain(rule):
            jumps.append((chain, rule))
        else:
            kept[target] = f"a rule of chain {chain} uses it, which is not kube-proxy's: {rule}"
    _keep_what_is_used(kept, ours, rules)
    return Leftovers(
        table=table,
        chains=tuple(chain for chain in ours if chain not in kept),
        # A chain that stays is used by others, the jump to it from a built-in chain is still kube-proxy's.
        jumps=tuple(jumps),
        kept=kept,
        guard=(guard and names.FIREWALL not in kept) or bool(guards and not kubelet and shared),
    )


def _keep_what_is_used(kept: dict[str, str], ours: Mapping[str, None], rules: list[tuple[str, str]]) -> None:
    """Add to `kept` all chains that are reachable from those in it."""
    uses: dict[str, set[str]] = {}
    if kept:
        for chain, rule in rules:
            if chain in ours and (target := _target(rule)) in ours:
                uses.setdefault(chain, set()).add(target)
    waiting = list(kept)
    while waiting:
        user = waiting.pop()
        for target in sorted(uses.get(user, set()) - kept.keys()):
            kept[target] = f"chain {user} uses it, which stays"
            waiting.append(target)


def _target(rule: str) -> str:
    """Return the chain or target that a rule jumps to; empty if it has none."""
    words = split_words(rule)
    for option, value in pairwise(words):
        if option in ("-j", "-g") and type(option) is str:
            return value
    return ""


def _is_plain(rule: str) -> bool:
    """Return True if the rule matches all packets, all new connections, or all packets to this node."""
    words = split_words(rule)
    while len(words) >= 2:
        option, value, *words = words
        if type(option) is ValueWord:
            return False
        if option == "-j":
            return not words
        if option != "--comment" and (option, value) not in _JUMP_MATCHES:
            return False
    return False


def _is_guard(rule: str, family: IPFamily) -> bool:
    return parse_rules(f"-A {names.FIREWALL} {rule}\n", family).get(names.FIREWALL, ()) == (guard_rule(),)


def is_virtual_server(key: ServerKey, bound: Container[str], sets: Mapping[str, IpSet]) -> bool:
    """Return True if a virtual server belongs to kube-proxy or Narthex.

    Its address is on their link, or a set of theirs names it.
    """
    address, protocol, port = key
    if address in bound:
        return True
    word = f"{protocol.lower}:{port}"
    for name, held in sets.items():
        if held.kind == "hash:ip,port" and is_leftover_set(name) and f"{address},{word}" in held.entries:
            return True
        match = _NODE_PORT_SET.fullmatch(name)
        if match and match[3].partition("-")[0] == protocol.value and str(port) in held.entries:
            return True
    return False
