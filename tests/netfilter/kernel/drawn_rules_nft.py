"""Random rule sets in the language of nft."""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.netfilter.kernel.drawn_rules import _HOOKS, PORTS, THERE, Case, _mark
from tests.proxy.kernel.packet_range import IIF, OIF, OWN

_TYPES = {"raw": "filter", "mangle": "filter", "nat": "nat", "filter": "filter"}
_PRIORITIES = {"raw": -300, "mangle": -150, "filter": 0}
_PROTOCOL = re.compile(r"(tcp|udp)(?= (?:dport|sport|flags))|(icmp)(?= type)|meta l4proto (tcp\b|udp\b|icmp\b|\{)")
"""Expressions that restrict a rule to one protocol. nft rejects rules for two."""
_MERGED = re.compile(r"sport != \d+ \w+ dport != \d|ip saddr != [\d.]+ ip daddr != \d")
"""nft 1.0.6 merges adjacent comparisons for inequality: `a != 1 b != 2` becomes `(a, b) != (1, 2)`, but lists them as written."""
_NAT = {"PREROUTING": -100, "POSTROUTING": 100}


class NftCase(Case):
    """One rule set in an inet table, so that addresses say their family."""

    def _rule(self, draw: Random, table: str, hook: str, further: Sequence[str]) -> str:
        while True:
            rule = self._any_rule(draw, table, hook, further)
            protocols = {found for each in _PROTOCOL.findall(rule) for found in each if found}
            # nft 1.0.6 lists `th dport` after `icmp type` as `icmp checksum`.
            if len(protocols) < 2 and not ("icmp " in rule and "th " in rule) and not _MERGED.search(rule):
                return rule

    def _any_rule(self, draw: Random, table: str, hook: str, further: Sequence[str]) -> str:
        words = [self._match(draw, table, hook) for _ in range(draw.choice((0, 1, 1, 2)))]
        if draw.random() < 0.3:
            words.append("counter")
        return " ".join(filter(None, (*words, self._statement(draw, table, hook, further))))

    def _match(self, draw: Random, table: str, hook: str) -> str:
        no = draw.choice(("", "", "!= "))
        port, source = self.shot.port or 80, self.shot.source_port or 2000
        mine = self.shot.protocol if self.shot.protocol != "icmp" else "tcp"
        other = draw.choice(PORTS)
        near = draw.choice((port, port, other))
        to = draw.choice((self.shot.destination, self.shot.destination, *THERE))
        kinds = [
            f"ip daddr {no}{to}",
            f"ip daddr {no}{to.rpartition('.')[0]}.0/24",
            f"ip daddr {no}{{ {to}, 10.61.200.0/24 }}",
            f"ip daddr {no}10.61.0.200-10.61.1.1",
            f"ip saddr {no}{self.shot.source}",
            f"ip saddr . ip daddr {no}{{ {self.shot.source} . {to}, 1.2.3.4 . 10.61.1.1 }}",
            f"{mine} dport {no}{near}",
            f"{mine} dport {no}{{ {other}, {near + 1}-{near + 20} }}",
            f"{mine} dport {no}{near - 3}-{near}",
            f"{mine} sport {no}{source}",
            f"th dport {no}{near}",
            f"meta l4proto {no}{self.shot.protocol}",
            "meta l4proto { tcp, udp }",
            f"meta mark & {_mark(draw):#x} {draw.choice(('==', '!='))} {draw.choice((0, 0x4000)):#x}",
            f"meta mark {no}{draw.choice((0, _mark(draw))):#x}",
            f"fib daddr type {no}local",
            f"fib daddr type {no}{draw.choice(('unicast', 'multicast'))}",
            f"ip daddr . meta l4proto . th dport {no}@drawn-ports",
            f"ip daddr {no}@drawn-nets",
            f"meta nfproto {no}ipv4",
            f"icmp type {no}{draw.choice(('echo-request', 'echo-reply'))}",
            f"tcp flags {draw.choice(('syn', '& (fin | syn | rst | ack) == syn', '& (syn | ack) == ack', 'syn / fin,syn,rst,ack'))}",
        ]
        if self.shot.protocol == "icmp":
            kinds = [kind for kind in kinds if not kind.startswith("th ")]
        if hook != "POSTROUTING":
            kinds.append(f"iifname {no}{draw.choice((IIF, 'nxcl*', OIF))}")
        if hook in ("FORWARD", "POSTROUTING"):
            kinds.append(f"oifname {no}{{ {IIF}, eth0 }}")
            kinds.append(f"oifname {no}{OIF}")
        if table != "raw":
            kinds += [
                f"ct state {draw.choice(('new', 'established,related', '!= new', 'untracked', 'new,untracked'))}",
                f"ct status {draw.choice(('dnat', '! dnat'))}",
                f"ct mark {no}{draw.choice((0, _mark(draw))):#x}",
                f"ct direction {draw.choice(('original', 'reply'))}",
                f"ct original ip daddr {no}{to}",
            ]
            if self.shot.port:
                kinds.append(f"meta l4proto {self.shot.protocol} ct original proto-dst {no}{near}")
        return draw.choice(kinds)

    def _statement(self, draw: Random, table: str, hook: str, further: Sequence[str]) -> str:
        mine = self.shot.protocol
        choices = ["accept", "return", "drop", ""]
        if table in ("raw", "mangle"):
            choices += [
                f"meta mark set {_mark(draw):#x}",
                f"meta mark set meta mark | {_mark(draw):#x}",
                f"meta mark set meta mark & {~_mark(draw) & 0xFFFFFFFF:#x} | {_mark(draw):#x}",
                f"meta mark set meta mark ^ {_mark(draw):#x} return",
            ]
        if table == "mangle":
            choices += [f"ct mark set {_mark(draw):#x}", "ct mark set meta mark", "meta mark set ct mark"]
        if table == "raw":
            choices += ["notrack"]
        if table == "filter":
            choices += ["reject", "reject with icmp host-prohibited"]
            choices += ["meta l4proto tcp reject with tcp reset"] * (mine == "tcp")
            choices += [
                "ct state vmap { established : drop, related : drop, new : accept }",
                f"ct state vmap {{ new : {_jump(draw, further)} }}",
            ]
        if table == "nat":
            choices = ["accept", "return"]
        if (table, hook) == ("nat", "PREROUTING"):
            to = draw.choice((*THERE, OWN[1]))
            choices += [f"dnat ip to {to}", f"dnat ip to {to}", "dnat ip to 10.61.1.1-10.61.1.3"]
            choices += ["dnat ip to numgen random mod 2 map { 0 : 10.61.1.1, 1 : 10.61.1.2 }"]
            choices += [f"dnat ip to {_hash(draw, mine)} mod 2 seed 0x2a map {{ 0 : 10.61.1.1, 1 : 10.61.1.2 }}"] * 3
            if mine != "icmp":
                with_ports = [
                    f"dnat ip to {to}:{draw.choice(PORTS)}",
                    "dnat ip to ip daddr . th dport map @drawn-endpoints",
                    "redirect to :8080",
                    f"dnat ip to {to}:8000-8003",
                ]
                choices += [f"meta l4proto {mine} {each}" for each in with_ports]
        if (table, hook) == ("nat", "POSTROUTING"):
            choices += [
                "masquerade",
                "snat ip to 10.50.255.1",
                "snat ip to 10.50.255.1-10.50.255.3",
                "masquerade fully-random",
            ]
        if further:
            chain = draw.choice(further)
            choices += [f"jump {chain}", f"goto {chain}"]
            choices += [
                f"numgen random mod 3 vmap {{ 0 : jump {chain}, 1-2 : return }}",
                f"{_hash(draw, mine)} mod 3 seed {draw.randrange(1 << 32):#x} vmap {{ 0 : jump {chain}, 1 : return }}",
                f"{_hash(draw, mine)} mod 2 offset 7 vmap {{ 7 : jump {chain}, 8 : return }}",
                f"ip daddr vmap {{ {self.shot.destination} : jump {chain}, 10.61.1.0/24 : goto {chain} }}"
                if not self.shot.destination.startswith("10.61.1.")
                else f"ip daddr vmap {{ {self.shot.destination} : goto {chain} }}",
                f"meta l4proto vmap {{ tcp : goto {chain}, udp : jump {chain} }}",
                f"iifname vmap {{ {IIF} : jump {chain} }}",
                f"ip protocol . th dport vmap {{ tcp . 80 : jump {chain}, udp . 53-443 : goto {chain} }}",
            ]
        return draw.choice(choices)


def _hash(draw: Random, protocol: str) -> str:
    """Draw a hash of fields; that of a port says its protocol."""
    fields = ["ip saddr", "ip daddr", "ip saddr . ip daddr"]
    if protocol != "icmp":
        fields += ["ip saddr . meta l4proto . ip daddr", f"ip saddr . {protocol} sport . {protocol} dport . ip daddr"]
    return f"jhash {draw.choice(fields)}"


def _jump(draw: Random, further: Sequence[str]) -> str:
    return f"jump {draw.choice(further)}" if further else "accept"


_SETS = """
set drawn-ports {
  type ipv4_addr . inet_proto . inet_service
  elements = { 10.61.1.1 . tcp . 80, 10.61.1.1 . udp . 53, 10.61.1.2 . tcp . 443, 10.61.2.1 . udp . 8080 }
}
set drawn-nets {
  type ipv4_addr
  flags interval
  elements = { 10.61.1.0/24, 10.50.0.0/23, 10.61.200.5-10.61.200.9 }
}
map drawn-endpoints {
  type ipv4_addr . inet_service : ipv4_addr . inet_service
  elements = { 10.61.1.1 . 80 : 10.61.2.1 . 8080, 10.61.1.2 . 443 : 10.61.1.1 . 80, 10.61.2.1 . 53 : 10.61.0.1 . 53 }
}
"""


def nft_scripts(cases: Sequence[NftCase]) -> list[str]:
    """What `nft -f` reads for all cases, in tables of a few hundred: the kernel looks through a table's chains again and
    again while it takes one in."""
    return [nft_script(cases[at : at + 200], f"drawn-{at}") for at in range(0, len(cases), 200)]


def nft_script(cases: Sequence[NftCase], table_name: str) -> str:
    """One table: each hook finds a case by its source in a verdict map."""
    lines = [f"table inet {table_name} {{", _SETS]
    for (table, hook), held in _by_hook(cases).items():
        for case in held:
            for chain, rules in reversed(list(case.tables[table, hook].items())):
                lines += [f"chain {table[:1]}{chain} {{", *(_renamed(rule, table, chain) for rule in rules), "}"]
    for (table, hook), held in _by_hook(cases).items():
        name = f"{table}-{hook.lower()}"
        elements = ", ".join(f"{case.shot.source} : goto {table[:1]}{case.first(table, hook)}" for case in held)
        lines += [f"map {name} {{", "type ipv4_addr : verdict", f"elements = {{ {elements} }}", "}"]
        priority = _NAT[hook] if table == "nat" else _PRIORITIES[table]
        lines += [f"chain base-{name} {{", f"type {_TYPES[table]} hook {hook.lower()} priority {priority};"]
        lines += [f"ip saddr vmap @{name}", "}"]
    return "\n".join([*lines, "}", ""])


def _by_hook(cases: Sequence[NftCase]) -> dict[Any, Any]:
    found = {}
    for table, hooks in _HOOKS.items():
        for hook in hooks:
            held = [case for case in cases if case.first(table, hook)]
            if held:
                found[table, hook] = held
    return found


def _renamed(rule: str, table: str, chain: str) -> str:
    """Chains of all tables of iptables are in one table here."""
    return rule.replace(f" {chain[:-1]}", f" {table[:1]}{chain[:-1]}") if chain[:-1] in rule else rule
