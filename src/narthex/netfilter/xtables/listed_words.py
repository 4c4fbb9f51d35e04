"""The wording of `iptables -L`, match by match and target by target, in the words of iptables-save.

The wording is that of the `print` functions of iptables' extensions, 1.4 to 1.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from narthex.netfilter.xtables.print import quoted


class Words(NamedTuple):
    """A rule in the words of iptables-save."""

    text: str
    unknown: tuple[str, ...]
    """Parts that have no such words."""
    has_target: bool


_PORT_NAMES = {"domain": "53", "http": "80", "https": "443", "ssh": "22", "smtp": "25", "ntp": "123", "ftp": "21"}
_ANY = ("0.0.0.0/0", "::/0", "anywhere", "*", "any", "::/0 ")
_FLAGS = ("FIN", "SYN", "RST", "PSH", "ACK", "URG")
_PROTOCOL_NUMBERS = {"6": "tcp", "17": "udp", "132": "sctp", "1": "icmp", "58": "ipv6-icmp"}

Match = re.Match[str]


def _no(sign: str | None) -> str:
    return "! " if sign and "!" in sign else ""


def _ports(m: Match) -> str:
    sides = {"dpt": "--dport", "spt": "--sport", "dpts": "--dport", "spts": "--sport"}
    value = ":".join(_PORT_NAMES.get(port, port) for port in m[4].split(":"))
    if not value.replace(":", "").isdigit():
        raise ValueError(f"the port {m[4]} is a name")
    return f"-m {m[1]} {_no(m[3])}{sides[m[2]]} {value}"


def _tcp_flags(m: Match) -> str:
    def names(bits: str) -> str:
        number = int(bits, 0)
        return ",".join(name for bit, name in enumerate(_FLAGS) if number >> bit & 1) or "NONE"

    return f"-m tcp {_no(m[1])}--tcp-flags {names(m[2])} {names(m[3])}"


def _addrtype(m: Match) -> str:
    words = ["-m addrtype"]
    for side, sign, kind in re.findall(r"(src|dst)-type (!?)(\S+)", m[0]):
        words.append(f"{_no(sign)}--{side}-type {kind}")
    words += (f"--limit-iface-{side}" for side in re.findall(r"limit-(in|out)", m[0]))
    return " ".join(words)


def _recent(m: Match) -> str:
    verbs = {"SET": "--set", "CHECK": "--rcheck", "UPDATE": "--update", "REMOVE": "--remove"}
    words = [f"-m recent {_no(m[1])}{verbs[m[2]]}"]
    said = m[3]
    for option in ("seconds", "hit_count"):
        found = re.search(rf"{option}: (\d+)", said)
        if found:
            words.append(f"--{option.replace('_', '')} {found[1]}")
    words += ["--reap"] * (" reap" in f" {said}")
    named = re.search(r"name: (\S+)", said)
    words.append(f"--name {quoted(named[1])}" if named else "")
    words += ["--rdest"] * ("side: dest" in said)
    return " ".join(filter(None, words))


_SIGN = r"(! ?)?"
_MATCHES: list[tuple[re.Pattern[str], Callable[[Match], str]]] = [
    (re.compile(r"/\*\s*(.*?)\s*\*/"), lambda m: f"-m comment --comment {quoted(' '.join(m[1].split()))}"),
    (re.compile(r"(tcp|udp|sctp|dccp|udplite) (dpts?|spts?):(!?)([\w:-]+)"), _ports),
    (re.compile(r"tcp flags:(!?)(0x[0-9A-Fa-f]+)/(0x[0-9A-Fa-f]+)"), _tcp_flags),
    (
        re.compile(r"multiport (dports|sports|ports) +(! ?)?(\S+)"),
        lambda m: f"-m multiport {_no(m[2])}--{m[1]} {m[3]}",
    ),
    (re.compile(r"ADDRTYPE\s+match(?:\s+(?:src|dst)-type\s+!?\S+|\s+limit-(?:in|out))+"), _addrtype),
    (
        re.compile(r"statistic\s+mode\s+random\s+(! ?)?probability\s+([\d.]+)"),
        lambda m: f"-m statistic --mode random {_no(m[1])}--probability {m[2]}",
    ),
    (
        re.compile(r"statistic\s+mode\s+nth\s+(! ?)?every\s+(\d+)(?:\s+packet\s+(\d+))?"),
        lambda m: f"-m statistic --mode nth {_no(m[1])}--every {m[2]} --packet {m[3] or 0}",
    ),
    (re.compile(rf"{_SIGN}match-set\s+(\S+)\s+(\S+)"), lambda m: f"-m set {_no(m[1])}--match-set {m[2]} {m[3]}"),
    (re.compile(r"mark match\s+(! ?)?(0x\S+)"), lambda m: f"-m mark {_no(m[1])}--mark {m[2]}"),
    (re.compile(r"connmark match\s+(! ?)?(0x\S+)"), lambda m: f"-m connmark {_no(m[1])}--mark {m[2]}"),
    (re.compile(rf"{_SIGN}ctstate\s+(\S+)"), lambda m: f"-m conntrack {_no(m[1])}--ctstate {m[2]}"),
    (re.compile(rf"{_SIGN}state\s+(\S+)"), lambda m: f"-m state {_no(m[1])}--state {m[2]}"),
    (
        re.compile(rf"{_SIGN}(ctorigsrc|ctorigdst|ctorigdstport|ctorigsrcport|ctstatus|ctdir)\s+(\S+)"),
        lambda m: f"-m conntrack {_no(m[1])}--{m[2]} {m[3]}",
    ),
    (
        re.compile(r"icmp(v6)? ?type (\d+)(?: code (\d+))?"),
        lambda m: f"-m icmp{'6' if m[1] else ''} --icmp{m[1] or ''}-type {m[2]}" + (f"/{m[3]}" if m[3] else ""),
    ),
    (
        re.compile(r"(ipv6-)?icmp(!?)type (!?)(\d+)(?: code (\d+))?"),
        lambda m: (
            f"-m icmp{'6' if m[1] else ''} {_no(m[2] or m[3])}--icmp{'v6' if m[1] else ''}-type {m[4]}"
            + (f"/{m[5]}" if m[5] else "")
        ),
    ),
    (
        re.compile(r"(source|destination) IP range (! ?)?(\S+)"),
        lambda m: f"-m iprange {_no(m[2])}--{'src' if m[1] == 'source' else 'dst'}-range {m[3]}",
    ),
    (
        re.compile(r"limit: avg (\S+) burst (\d+)(?: mode \S+)*"),
        lambda m: f"-m limit --limit {m[1]} --limit-burst {m[2]}",
    ),
    (
        re.compile(
            r"(! ?)?recent: (SET|CHECK|UPDATE|REMOVE)((?: (?:seconds|hit_count|TTL-Match|name|side|mask):? ?\S*| reap)*)"
        ),
        _recent,
    ),
    (re.compile(r"(! ?)?owner (UID|GID) match (\S+)"), lambda m: f"-m owner {_no(m[1])}--{m[2].lower()}-owner {m[3]}"),
    (
        re.compile(r"PHYSDEV match((?: (?:! )?--physdev-\S+(?: (?!-|!)[\w.+-]+)?)+)"),
        lambda m: f"-m physdev{m[1]}",
    ),
    (
        re.compile(r"MAC ?(! ?)?((?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2})"),
        lambda m: f"-m mac {_no(m[1])}--mac-source {m[2]}",
    ),
    (re.compile(r"length (! ?)?(\S+)"), lambda m: f"-m length {_no(m[1])}--length {m[2]}"),
    (re.compile(r"DSCP match (!?)(0x\S+)"), lambda m: f"-m dscp {_no(m[1])}--dscp {m[2]}"),
    (re.compile(r"PKTTYPE (!?)= (\w+)"), lambda m: f"-m pkttype {_no(m[1])}--pkt-type {m[2]}"),
    (re.compile(r"nfacct-name\s+(\S+)"), lambda m: f"-m nfacct --nfacct-name {m[1]}"),
    (re.compile(r"rpfilter((?: \w+)*)"), lambda m: "-m rpfilter" + "".join(f" --{word}" for word in m[1].split())),
    (re.compile(r"(?:tcp|udp|sctp)(?=\s|$)"), lambda _: ""),
]


def _mark(m: Match) -> str:
    value = m[2]
    if m[1] == "xset":
        return f"--set-xmark {value}"
    if m[1] == "set":
        return f"--set-xmark {value}/0xffffffff"
    if m[1] == "and":
        return f"--set-xmark 0x0/{~int(value, 0) & 0xFFFFFFFF:#x}"
    return f"--{m[1]}-mark {value}"


def _connmark(m: Match) -> str:
    verb, rest = m[1], m[2] or ""
    if verb in ("save", "restore"):
        masks = re.findall(r"(ctmask|nfmask|mask) (~?0x\w+)", rest)
        return f"--{verb}-mark" + "".join(f" --{name} {value}" for name, value in masks)
    if verb == "xset":
        return f"--set-xmark {rest.strip()}"
    if verb == "set":
        return f"--set-xmark {rest.strip()}/0xffffffff"
    return f"--{verb}-mark {rest.strip()}"


_TARGETS: dict[str, list[tuple[re.Pattern[str], Callable[[Match], str]]]] = {
    "DNAT": [
        (re.compile(r"to:(\S+)"), lambda m: f"--to-destination {m[1]}"),
        (re.compile(r"random|persistent"), lambda m: f"--{m[0]}"),
    ],
    "SNAT": [
        (re.compile(r"to:(\S+)"), lambda m: f"--to-source {m[1]}"),
        (re.compile(r"random-fully|random|persistent"), lambda m: f"--{m[0]}"),
    ],
    "MASQUERADE": [
        (re.compile(r"masq ports: (\S+)"), lambda m: f"--to-ports {m[1]}"),
        (re.compile(r"random-fully|random"), lambda m: f"--{m[0]}"),
    ],
    "REDIRECT": [
        (re.compile(r"redir ports (\S+)"), lambda m: f"--to-ports {m[1]}"),
        (re.compile(r"random"), lambda _: "--random"),
    ],
    "REJECT": [(re.compile(r"reject-with (\S+)"), lambda m: f"--reject-with {m[1]}")],
    "MARK": [(re.compile(r"MARK (xset|set|or|and|xor) (0x\S+)"), _mark)],
    "CONNMARK": [(re.compile(r"CONNMARK (save|restore|set|xset|or|and|xor)((?: \S+)*)"), _connmark)],
    "CT": [(re.compile(r"(?:CT )?notrack"), lambda _: "--notrack")],
    "LOG": [
        (re.compile(r"LOG(?: flags \S+)?(?: level \S+)?"), lambda _: ""),
        (re.compile(r'prefix ("[^"]*"|`[^\']*\')'), lambda m: f"--log-prefix {quoted(m[1][1:-1])}"),
    ],
    "NFLOG": [(re.compile(r"nflog-\w+ +(?:\"[^\"]*\"|\S+)"), lambda _: "")],
    "TCPMSS": [(re.compile(r"TCPMSS clamp to PMTU|TCPMSS set \d+"), lambda _: "--clamp-mss-to-pmtu")],
}


def save_words(target: str, protocol: str, columns: list[str], rest: str) -> Words:
    """A line's parts. `columns` are source and destination, before them in and out where they are printed. Raises
    ValueError for names where numbers are wanted."""
    words: list[str] = []
    options = ("-i", "-o", "-s", "-d")[-len(columns) :]
    for option, value in zip(options, columns, strict=True):
        negate, bare = value.startswith("!"), value.lstrip("! ")
        if bare in _ANY and not negate:
            continue
        if option in ("-s", "-d"):
            bare = {"loopback/8": "127.0.0.0/8", "localhost": "127.0.0.1"}.get(bare, bare)
            if not re.fullmatch(r"[0-9a-fA-F.:/]+", bare):
                raise ValueError(f"{bare} is a name")
        words.append(f"{'! ' if negate else ''}{option} {bare}")
    negate, bare = protocol.startswith("!"), protocol.lstrip("!")
    if bare not in ("all", "0"):
        words.append(f"{'! ' if negate else ''}-p {_PROTOCOL_NUMBERS.get(bare, bare)}")
    behind: list[str] = []
    unknown: list[str] = []
    goto = "[goto]" in rest
    rest = rest.replace("[goto]", "").strip()
    own = _TARGETS.get(target, [])
    while rest:
        for pattern, words_of in (*own, *_MATCHES):
            found = pattern.match(rest)
            if found is None or not found[0]:
                continue
            (behind if (pattern, words_of) in own else words).append(words_of(found))
            rest = rest[found.end() :].strip()
            break
        else:
            # Up to the next thing that is known, it belongs together.
            ends = [found.start() for pattern, _ in (*own, *_MATCHES[:-1]) if (found := pattern.search(rest))]
            end = min((each for each in ends if each > 0 and rest[each - 1] == " "), default=len(rest))
            unknown.append(rest[:end].strip())
            rest = rest[end:].strip()
    if target:
        words.append(f"{'-g' if goto else '-j'} {target}")
    words += behind
    return Words("".join(f" {word}" for word in words if word), tuple(unknown), bool(target))
