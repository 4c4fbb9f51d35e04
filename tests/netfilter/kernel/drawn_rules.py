"""Random rule sets in the words of iptables-restore and of nft, each for packets of one source only.

Only what the walk understands is drawn, and nothing whose outcome depends on more than the packet and chance.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.proxy.kernel.packet_range import IIF, OIF, OWN, Shot

PORTS = (53, 80, 443, 1000, 8080)
THERE = ("10.61.1.1", "10.61.1.2", "10.61.2.1", "10.61.200.7")
_STATES = ("NEW", "ESTABLISHED", "RELATED,ESTABLISHED", "NEW,RELATED", "INVALID", "UNTRACKED", "NEW,UNTRACKED")


def source_of(number: int) -> str:
    """The source that a case's rules are for."""
    return f"10.50.{number >> 8}.{number & 255}"


def numbers(count: int) -> list[int]:
    """So many numbers of cases, without those whose source may be a network's broadcast address."""
    return [number for number in range(count + count // 64) if 0 < number & 255 < 255][:count]


def drawn_shot(draw: Random, number: int) -> Shot:
    protocol = draw.choice(("tcp", "tcp", "udp", "udp", "icmp"))
    to = draw.choice((*THERE, *THERE, *OWN))
    if protocol == "icmp":
        return Shot(source_of(number), to, protocol)
    return Shot(source_of(number), to, protocol, draw.choice(PORTS), draw.choice((1024, 2000, 40000)))


class Case(ABC):
    """One rule set: lines by table, with chains of its own; the hooks' chains lead there by the packet's source."""

    def __init__(self, draw: Random, number: int) -> None:
        self.number = number
        self.shot = drawn_shot(draw, number)
        self.tables: dict[tuple[str, str], dict[str, list[str]]] = {}
        for table, hooks in _HOOKS.items():
            for hook in hooks:
                if draw.random() < _LIKELY[table]:
                    self._hook(draw, table, hook)

    def _hook(self, draw: Random, table: str, hook: str) -> None:
        count = draw.choice((1, 1, 2, 3))
        chains = [f"c{self.number}{hook[:2].lower()}{each}" for each in range(count)]
        for at, chain in enumerate(chains):
            rules = [self._rule(draw, table, hook, chains[at + 1 :]) for _ in range(draw.randint(1, 4))]
            self.tables.setdefault((table, hook), {})[chain] = rules

    @abstractmethod
    def _rule(self, draw: Random, table: str, hook: str, further: Sequence[str]) -> str:
        """A rule of a chain that may lead to the `further` ones."""

    def first(self, table: str, hook: str) -> str | None:
        """The chain that the hook leads to, None when the case has nothing there."""
        chains = self.tables.get((table, hook))
        return next(iter(chains)) if chains else None

    def text(self) -> str:
        """All of its rules, for a person."""
        return "\n".join(
            f"{table} {hook} {chain}: {rule}"
            for (table, hook), chains in self.tables.items()
            for chain, rules in chains.items()
            for rule in rules
        )


_HOOKS = {
    "raw": ("PREROUTING",),
    "mangle": ("PREROUTING", "FORWARD", "POSTROUTING"),
    "nat": ("PREROUTING", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD"),
}
_LIKELY = {"raw": 0.25, "mangle": 0.3, "nat": 0.75, "filter": 0.8}


def _mark(draw: Random) -> int:
    return draw.choice((0x1, 0x4000, 0x8000, 0xC000, 0x4001))


class SaveCase(Case):
    """In the words of iptables-restore."""

    def _rule(self, draw: Random, table: str, hook: str, further: Sequence[str]) -> str:
        protocol = draw.choice(("", "", self.shot.protocol, self.shot.protocol, "tcp", "udp"))
        words = (
            [f"{draw.choice(('', '', '! '))}-s {self.shot.source}/{draw.choice((8, 16, 24, 32))}"]
            if draw.random() < 0.15
            else []
        )
        if draw.random() < 0.35:
            to = draw.choice((self.shot.destination, self.shot.destination, *THERE))
            words.append(f"{draw.choice(('', '', '! '))}-d {to}/{draw.choice((16, 24, 32, 32))}")
        if draw.random() < 0.15:
            words.append(
                f"{draw.choice(('', '! '))}-i {draw.choice((IIF, 'nxcl+', OIF, 'eth0'))}" * (hook != "POSTROUTING")
            )
        if draw.random() < 0.15 and hook in ("FORWARD", "POSTROUTING"):
            words.append(f"{draw.choice(('', '! '))}-o {draw.choice((IIF, 'nx+', OIF))}")
        if protocol:
            words.append(f"-p {protocol}")
        matches = [self._match(draw, table, protocol) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        # iptables-nft 1.8.9 does not print two of `-m tcp` as they were given.
        names = [match.split()[1] for match in matches if match]
        words += matches if len(set(names)) == len(names) else matches[:1]
        target, needs = self._target(draw, table, hook, protocol, further)
        if needs and not protocol:
            words.append(f"-p {needs}")
        return " ".join(filter(None, (*words, target)))

    def _match(self, draw: Random, table: str, protocol: str) -> str:
        sign = draw.choice(("", "", "! "))
        port, source = self.shot.port or 80, self.shot.source_port or 2000
        kinds = ["mark", "state", "comment", "addrtype", "range", "statistic", "nth", "set", "orig"]
        if table == "raw":
            kinds = ["mark", "addrtype", "range", "set", "statistic"]
        if protocol in ("tcp", "udp"):
            kinds += ["dport", "dport", "sport", "multiport", "multiport"]
        if protocol == "tcp":
            kinds += ["flags", "syn"]
        if protocol == "icmp":
            kinds += ["icmp", "icmp"]
        if table != "raw":
            kinds += ["connmark", "dnat"]
        kind = draw.choice(kinds)
        other = draw.choice(PORTS)
        near = draw.choice((port, port, other))
        made: dict[str, Callable[[], str]] = {
            "mark": lambda: (
                f"-m mark {sign}--mark {_mark(draw):#x}/{draw.choice((0x4000, 0xC000, 0xFFFFFFFF, 0x1)):#x}"
            ),
            "connmark": lambda: (
                f"-m connmark {sign}--mark {draw.choice((0, _mark(draw))):#x}/{draw.choice((0x4000, 0xFFFF)):#x}"
            ),
            "state": lambda: f"-m conntrack {sign}--ctstate {draw.choice(_STATES)}",
            "dnat": lambda: f"-m conntrack {sign}--ctstate {draw.choice(('DNAT', 'NEW,DNAT', 'SNAT'))}",
            "comment": lambda: '-m comment --comment "a \\"word\\" -j DROP"',
            "addrtype": lambda: (
                f"-m addrtype {sign}--{draw.choice(('dst', 'src'))}-type {draw.choice(('LOCAL', 'UNICAST', 'MULTICAST', 'LOCAL,UNICAST'))}"
            ),
            "range": lambda: (
                f"-m iprange {sign}--dst-range {draw.choice(('10.61.0.200-10.61.1.1', '10.61.1.2-10.61.3.0', '10.60.0.0-10.61.1.1'))}"
            ),
            "statistic": lambda: (
                f"-m statistic --mode random {sign}--probability {draw.choice(('0.5', '0.33333', '0.1'))}"
            ),
            "nth": lambda: "-m statistic --mode nth --every 3 --packet 0",
            "set": lambda: (
                f"-m set {sign}--match-set {draw.choice(('drawn-ports dst,dst', 'drawn-nets dst', 'drawn-nets src'))}"
            ),
            "orig": lambda: (
                draw.choice(
                    (
                        f"-m conntrack {sign}--ctorigdst {draw.choice((self.shot.destination, THERE[0]))}",
                        f"-m conntrack --ctproto {self.shot.protocol} {sign}--ctorigdstport {near}"
                        if self.shot.port
                        else "-m conntrack --ctdir ORIGINAL",
                        f"-m conntrack --ctdir {draw.choice(('ORIGINAL', 'REPLY'))}",
                    )
                )
                if table != "raw"
                else ""
            ),
            "dport": lambda: (
                f"-m {protocol} {sign}--dport {draw.choice((str(near), f'{near - 10}:{near + 5}', ':1000', '1000:'))}"
            ),
            "sport": lambda: f"-m {protocol} {sign}--sport {draw.choice((source, 40000))}",
            "multiport": lambda: (
                f"-m multiport {sign}--{draw.choice(('dports', 'dports', 'sports', 'ports'))} {draw.choice((f'{near},{other}', f'{other},{near - 1}:{near + 1},9', '2000,53'))}"
            ),
            "flags": lambda: (
                f"-m tcp {sign}--tcp-flags {draw.choice(('FIN,SYN,RST,ACK SYN', 'SYN,ACK ACK', 'RST RST', 'SYN SYN', 'ALL SYN'))}"
            ),
            "syn": lambda: f"-m tcp {sign}--syn",
            "icmp": lambda: f"-m icmp {sign}--icmp-type {draw.choice(('8', '8/0', '0', '3/1', 'any'))}".replace(
                "! --icmp-type any", "--icmp-type any"
            ),
        }
        return made[kind]()

    def _target(self, draw: Random, table: str, hook: str, protocol: str, further: Sequence[str]) -> tuple[str, str]:
        """The target's words, and the protocol that it needs."""
        mine = self.shot.protocol
        ports = "tcp" if mine == "icmp" else mine
        choices = [("-j ACCEPT", ""), ("-j RETURN", ""), ("", ""), ("-j DROP", "")]
        if table in ("raw", "mangle"):
            choices = [("-j ACCEPT", ""), ("-j RETURN", ""), ("-j DROP", "")]
            choices += [(f"-j MARK --set-xmark {_mark(draw):#x}/{draw.choice((0x4000, 0xFFFFFFFF, 0x0)):#x}", "")] * 3
            choices += [(f"-j MARK --{draw.choice(('or', 'and', 'xor'))}-mark {_mark(draw):#x}", "")] * 2
        if table == "mangle":
            choices += [
                (
                    f"-j CONNMARK --{draw.choice(('save-mark', 'restore-mark', 'set-xmark 0x4000/0xff00', 'save-mark --nfmask 0x4000 --ctmask 0xffff'))}",
                    "",
                )
            ] * 2
        if table == "raw":
            choices += [("-j CT --notrack", "")]
        if table == "filter":
            choices += [
                ("-j REJECT --reject-with icmp-port-unreachable", ""),
                ("-j REJECT --reject-with icmp-host-prohibited", ""),
            ]
            choices += (
                [("-j REJECT --reject-with tcp-reset", "tcp")] if protocol in ("", "tcp") and mine == "tcp" else []
            )
        if table == "nat" and hook == "PREROUTING":
            to = draw.choice((*THERE, OWN[1]))
            choices = [("-j ACCEPT", ""), ("-j RETURN", ""), (f"-j DNAT --to-destination {to}", "")]
            if protocol in ("tcp", "udp") or (not protocol and mine != "icmp"):
                choices += [
                    (f"-j DNAT --to-destination {to}:{draw.choice(PORTS)}", ports),
                    (f"-j DNAT --to-destination {to}:8000-8003", ports),
                    (f"-j DNAT --to-destination 10.61.1.1-10.61.1.3:{draw.choice(PORTS)}", ports),
                    ("-j REDIRECT --to-ports 8080", ports),
                    ("-j REDIRECT --to-ports 9000-9002", ports),
                ]
        if table == "nat" and hook == "POSTROUTING":
            choices = [
                ("-j ACCEPT", ""),
                ("-j RETURN", ""),
                ("-j MASQUERADE", ""),
                ("-j SNAT --to-source 10.50.255.1", ""),
            ]
            choices += [("-j SNAT --to-source 10.50.255.1-10.50.255.3", "")]
        if further:
            choices += [
                (f"-j {draw.choice(further)}", ""),
                (f"-j {draw.choice(further)}", ""),
                (f"-g {draw.choice(further)}", ""),
            ]
        return draw.choice(choices)


def save_script(cases: Sequence[Any]) -> str:
    """What iptables-restore reads for all cases: each hook finds a case by its source in two steps."""
    lines = []
    for table, hooks in _HOOKS.items():
        lines.append(f"*{table}")
        body = []
        for hook in hooks:
            groups: dict[Any, Any] = {}
            for case in cases:
                if case.first(table, hook):
                    groups.setdefault(case.number >> 5, []).append(case)
            for group, held in groups.items():
                name = f"g{hook[:2].lower()}{group}"
                lines.append(f":{name} - [0:0]")
                body.append(f"-A {hook} -s {source_of(group << 5)}/27 -g {name}")
                for case in held:
                    body.append(f"-A {name} -s {case.shot.source}/32 -g {case.first(table, hook)}")
                    for chain, rules in case.tables[table, hook].items():
                        lines.append(f":{chain} - [0:0]")
                        body += (f"-A {chain} {rule}" for rule in rules)
        lines += [*body, "COMMIT"]
    return "".join(line + "\n" for line in lines)


IPSETS = """create drawn-ports hash:ip,port family inet
add drawn-ports 10.61.1.1,tcp:80
add drawn-ports 10.61.1.1,udp:53
add drawn-ports 10.61.1.2,tcp:443
add drawn-ports 10.61.2.1,udp:8080
create drawn-nets hash:net family inet
add drawn-nets 10.61.1.0/24
add drawn-nets 10.50.0.0/23
"""
