"""Parser for `iptables -L`.

Each line is translated into the syntax of iptables-save and parsed as such. A part without a translation becomes `Unknown`.
Without `-v` the listing omits interfaces, so every rule gets an `OmittedMatch`. The parser accepts `column -t`, the dashes
and asterisks of wikis, and a comment that was split into two lines.

The wording is that of the `print` functions of the iptables extensions, 1.4 to 1.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from narthex.model import IPFamily
from narthex.model.lines import MAX_LINE
from narthex.netfilter.ast import TCP_FLAGS, OmittedMatch, Rule, Unknown
from narthex.netfilter.cuts import gap_rule, is_cut_mark
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.netfilter.xtables.parse import long_rule, read_rule
from narthex.netfilter.xtables.print import quoted
from narthex.netfilter.xtables.values import port_named

CHAIN = re.compile(
    r"\**+Chain\s++(\S++)\s++\((?:\s*+policy\s++(\w++)[^)]*+|(?:(\d++)\s++references?|(?=[^)]*?reference)[^)]*+))\)\s*+\**+$"
)
"""The first line of a chain."""
_HEADER = re.compile(r"(?:num\s+)?(?:pkts\s+bytes\s+)?target\s+prot\s+opt\b")
_DASHES = ("--", "—", "–", "-f", "!f", "-", "----")
MAX_PARTS = 32
"""Parts of a rule behind its columns that are distinguished: matches, options of the target, unknown words. Rules have up to a dozen;
each part costs a search of the rest of the line."""
_NO_INTERFACES = "iptables -L without -v omits the interfaces of a rule"


class ListedRule(NamedTuple):
    """A rule of a listing, with its line number starting at 1."""

    number: int
    text: str
    rule: Rule


class ListingColumns:
    """The columns of a listing: the number of columns before the target, and whether it has interfaces."""

    def __init__(self, header: str = "") -> None:
        words = header.split()
        self.read = bool(header)
        self.before = (words[:1] == ["num"]) + 2 * ("pkts" in words)
        self.interfaces = "in" in words and "out" in words


class ChainListing:
    """The listing of one chain.

    Args:
        lines: The lines of the text.
        start: Index of the line that CHAIN matches.
        family: Family of the rules.
        filtered: True if the listing went through a filter such as `grep`.
        is_command: Returns True for a line with a shell command, which ends the listing.
    """

    def __init__(
        self,
        lines: Sequence[str],
        start: int,
        family: IPFamily,
        *,
        filtered: bool = False,
        is_command: Callable[[str], bool] = lambda _line: False,
    ) -> None:
        header = CHAIN.match(lines[start].strip())
        assert header is not None
        self.chain = header[1]
        self.policy = header[2] or "-"
        self.references = int(header[3] or 0)
        """The number of rules that call the chain, as far as the tool says it."""
        self.line = start + 1
        self.rules: list[ListedRule] = []
        self.whole = not filtered
        self._is_command = is_command
        self.next = self._read(lines, start + 1, family)

    def _read(self, lines: Sequence[str], number: int, family: IPFamily) -> int:
        columns = ListingColumns()
        while number < len(lines):
            text = _clean(lines[number])
            if not text:
                # Blogs and mails contain empty lines anywhere. The listing ends where something else begins.
                number = next((n for n in range(number, len(lines)) if lines[n].strip()), len(lines))
                if number < len(lines) and _split_columns(lines[number].strip(), columns):
                    continue
                break
            if CHAIN.match(text) or text.startswith("```") or self._is_command(lines[number].strip()):
                break
            is_rule = _split_columns(text, columns) is not None
            if _HEADER.match(text):
                if columns.read:
                    # What follows is another chain, and its first line is missing.
                    self.whole = False
                    self.rules.append(ListedRule(number + 1, text, gap_rule()))
                    return number + 1
                columns = ListingColumns(text)
            elif not is_rule and is_cut_mark(text):
                self.whole = False
                self.rules.append(ListedRule(number + 1, text, gap_rule()))
            elif is_rule and not text.startswith("#"):
                text, number = _with_comment_end(lines, number, text)
                self.rules.append(ListedRule(number + 1, text, _parse_rule(text, columns, family)))
            elif not text.startswith("#"):
                break
            number += 1
        return number


def headless_rule(lines: Sequence[str], number: int, family: IPFamily) -> tuple[ListedRule, int]:
    """Parse a rule without the header of its chain, as `grep` leaves it. Return it and the index of the next line."""
    text, last = _with_comment_end(lines, number, _clean(lines[number]))
    return ListedRule(last + 1, text, _parse_rule(text, ListingColumns(), family)), last + 1


def is_rule_line(text: str) -> bool:
    """Return True for a rule without the header of its chain."""
    return _split_columns(text, ListingColumns()) is not None


def _clean(line: str) -> str:
    return line.strip().strip("*").strip()


def _with_comment_end(lines: Sequence[str], number: int, text: str) -> tuple[str, int]:
    """Append the next line if it is the second half of a comment. Return the text and the index of its last line."""
    following = number + 1
    if "/*" in text and "*/" not in text and following < len(lines):
        return text + _clean(lines[following]), following
    return text, number


def _split_columns(text: str, columns: ListingColumns) -> tuple[str, str, list[str], str] | None:
    """Return target, protocol, interfaces and addresses, and the rest of a rule; None for another line."""
    words = text.split()
    before = columns.before
    if not before and len(words) > 5 and words[0].isdigit():
        # Without a header: line numbers, counters, or both.
        before = next((n for n in range(1, 4) if not words[n].rstrip("KMGT").isdigit() or n == 3), 0)
    words = words[before:]
    at = next((n for n in range(1, min(3, len(words))) if words[n] in _DASHES), None)
    count = 4 if columns.interfaces else 2
    if at is None or len(words) < at + 1 + count:
        return None
    rest = text.split(None, before + at + 1 + count)
    return (
        words[0] if at == 2 else "",
        words[at - 1],
        words[at + 1 : at + 1 + count],
        rest[-1] if len(rest) > before + at + 1 + count else "",
    )


def _parse_rule(text: str, columns: ListingColumns, family: IPFamily) -> Rule:
    parts = _split_columns(text, columns)
    if parts is None:
        return Rule((Unknown(text),))
    if len(text) > MAX_LINE:
        return Rule((long_rule(text),))
    try:
        translated = _translate(*parts)
        own = IPFamily.IPV6 if any(":" in each for each in parts[2]) else family
        rule = read_rule(f"-A X{translated.text}", own)
    except (SaveTextError, ValueError):
        return Rule((Unknown(text),))
    unknown = (Unknown(" ".join(translated.unknown)),) if translated.unknown else ()
    omitted = () if columns.interfaces else (OmittedMatch(_NO_INTERFACES),)
    target = rule.expressions[-1:] if parts[0] else ()
    matches = rule.expressions[: len(rule.expressions) - len(target)]
    return Rule((*omitted, *matches, *unknown, *target), rule.comment)


# ---- translation to the syntax of iptables-save --------------------------------------------------------------------


class _SaveSyntax(NamedTuple):
    """A rule in the syntax of iptables-save."""

    text: str
    unknown: tuple[str, ...]
    """Parts without a translation."""


_ADDRESS_NAMES = {
    "loopback/8": "127.0.0.0/8",
    "localhost": "127.0.0.1",
    "base-address.mcast.net/4": "224.0.0.0/4",
    "link-local/16": "169.254.0.0/16",
    "ip6-localhost": "::1",
    "ip6-loopback": "::1",
}
"""Names that are in /etc/hosts or /etc/networks of most nodes."""
_ANY = ("0.0.0.0/0", "::/0", "anywhere", "*", "any", "::/0 ")
_PROTOCOL_NUMBERS = {"6": "tcp", "17": "udp", "132": "sctp", "1": "icmp", "58": "ipv6-icmp"}

Match = re.Match[str]


def _negation(sign: str | None) -> str:
    return "! " if sign and "!" in sign else ""


def _ports(m: Match) -> str:
    sides = {"dpt": "--dport", "spt": "--sport", "dpts": "--dport", "spts": "--sport"}
    value = ":".join(str(port_named(port)) for port in m[4].split(":"))
    return f"-m {m[1]} {_negation(m[3])}{sides[m[2]]} {value}"


def _tcp_flags(m: Match) -> str:
    def names(bits: str) -> str:
        """Return the names of the set bits, or NONE."""
        number = int(bits, 0)
        return ",".join(name.upper() for bit, name in enumerate(TCP_FLAGS[:6]) if number >> bit & 1) or "NONE"

    return f"-m tcp {_negation(m[1])}--tcp-flags {names(m[2])} {names(m[3])}"


def _addrtype(m: Match) -> str:
    words = ["-m addrtype"]
    for side, sign, kind in re.findall(r"(src|dst)-type (!?)(\S+)", m[0]):
        words.append(f"{_negation(sign)}--{side}-type {kind}")
    words += (f"--limit-iface-{side}" for side in re.findall(r"limit-(in|out)", m[0]))
    return " ".join(words)


def _recent(m: Match) -> str:
    verbs = {"SET": "--set", "CHECK": "--rcheck", "UPDATE": "--update", "REMOVE": "--remove"}
    words = [f"-m recent {_negation(m[1])}{verbs[m[2]]}"]
    text = m[3]
    for option in ("seconds", "hit_count"):
        found = re.search(rf"{option}: (\d+)", text)
        if found:
            words.append(f"--{option.replace('_', '')} {found[1]}")
    words += ["--reap"] * (" reap" in f" {text}")
    named = re.search(r"name: (\S+)", text)
    words.append(f"--name {quoted(named[1])}" if named else "")
    words += ["--rdest"] * ("side: dest" in text)
    return " ".join(filter(None, words))


_SIGN = r"(! ?)?"
_LISTED_COMMENT = re.compile(r"/\*(.*?)\*/")
_MATCHES: list[tuple[re.Pattern[str], Callable[[Match], str]]] = [
    (_LISTED_COMMENT, lambda m: f"-m comment --comment {quoted(' '.join(m[1].split()))}"),
    (re.compile(r"(tcp|udp|sctp|dccp|udplite) (dpts?|spts?):(!?)([\w:-]+)"), _ports),
    (re.compile(r"tcp flags:(!?)(0x[0-9A-Fa-f]+)/(0x[0-9A-Fa-f]+)"), _tcp_flags),
    (
        re.compile(r"multiport (dports|sports|ports) +(! ?)?(\S+)"),
        lambda m: f"-m multiport {_negation(m[2])}--{m[1]} {m[3]}",
    ),
    (re.compile(r"ADDRTYPE\s+match(?:\s+(?:src|dst)-type\s+!?\S+|\s+limit-(?:in|out))+"), _addrtype),
    (
        re.compile(r"statistic\s+mode\s+random\s+(! ?)?probability\s+([\d.]+)"),
        lambda m: f"-m statistic --mode random {_negation(m[1])}--probability {m[2]}",
    ),
    (
        re.compile(r"statistic\s+mode\s+nth\s+(! ?)?every\s+(\d+)(?:\s+packet\s+(\d+))?"),
        lambda m: f"-m statistic --mode nth {_negation(m[1])}--every {m[2]} --packet {m[3] or 0}",
    ),
    (re.compile(rf"{_SIGN}match-set\s+(\S+)\s+(\S+)"), lambda m: f"-m set {_negation(m[1])}--match-set {m[2]} {m[3]}"),
    (re.compile(r"mark match\s+(! ?)?(0x\S+)"), lambda m: f"-m mark {_negation(m[1])}--mark {m[2]}"),
    (re.compile(r"connmark match\s+(! ?)?(0x\S+)"), lambda m: f"-m connmark {_negation(m[1])}--mark {m[2]}"),
    (re.compile(rf"{_SIGN}ctstate\s+(\S+)"), lambda m: f"-m conntrack {_negation(m[1])}--ctstate {m[2]}"),
    (re.compile(rf"{_SIGN}state\s+(\S+)"), lambda m: f"-m state {_negation(m[1])}--state {m[2]}"),
    (
        re.compile(rf"{_SIGN}(ctorigsrc|ctorigdst|ctorigdstport|ctorigsrcport|ctstatus|ctdir)\s+(\S+)"),
        lambda m: f"-m conntrack {_negation(m[1])}--{m[2]} {m[3]}",
    ),
    (
        re.compile(r"icmp(v6)? ?type (\d+)(?: code (\d+))?"),
        lambda m: f"-m icmp{'6' if m[1] else ''} --icmp{m[1] or ''}-type {m[2]}" + (f"/{m[3]}" if m[3] else ""),
    ),
    (
        re.compile(r"(ipv6-)?icmp(!?)type (!?)(\d+)(?: code (\d+))?"),
        lambda m: (
            f"-m icmp{'6' if m[1] else ''} {_negation(m[2] or m[3])}--icmp{'v6' if m[1] else ''}-type {m[4]}"
            + (f"/{m[5]}" if m[5] else "")
        ),
    ),
    (
        re.compile(r"(source|destination) IP range (! ?)?(\S+)"),
        lambda m: f"-m iprange {_negation(m[2])}--{'src' if m[1] == 'source' else 'dst'}-range {m[3]}",
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
    (
        re.compile(r"(! ?)?owner (UID|GID) match (\S+)"),
        lambda m: f"-m owner {_negation(m[1])}--{m[2].lower()}-owner {m[3]}",
    ),
    (re.compile(r"PHYSDEV match((?: (?:! )?--physdev-\S+(?: (?!-|!)[\w.+-]+)?)+)"), lambda m: f"-m physdev{m[1]}"),
    (
        re.compile(r"MAC ?(! ?)?((?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2})"),
        lambda m: f"-m mac {_negation(m[1])}--mac-source {m[2]}",
    ),
    (re.compile(r"length (! ?)?(\S+)"), lambda m: f"-m length {_negation(m[1])}--length {m[2]}"),
    (re.compile(r"DSCP match (!?)(0x\S+)"), lambda m: f"-m dscp {_negation(m[1])}--dscp {m[2]}"),
    (re.compile(r"PKTTYPE (!?)= (\w+)"), lambda m: f"-m pkttype {_negation(m[1])}--pkt-type {m[2]}"),
    (re.compile(r"nfacct-name\s+(\S+)"), lambda m: f"-m nfacct --nfacct-name {m[1]}"),
    (re.compile(r"rpfilter((?: \w+)*)"), lambda m: "-m rpfilter" + "".join(f" --{word}" for word in m[1].split())),
    (re.compile(r"(! )?ipvs(?=\s|$)"), lambda m: f"-m ipvs {_negation(m[1])}--ipvs"),
    (
        re.compile(r"(! )?(vproto|vaddr|vport) (\S+)"),
        lambda m: f"-m ipvs {_negation(m[1])}--{m[2]} {_PROTOCOL_NUMBERS.get(m[3], m[3])}",
    ),
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
        (re.compile(r'prefix ("[^"]*"|`[^\'`]*\')'), lambda m: f"--log-prefix {quoted(m[1][1:-1])}"),
    ],
    "NFLOG": [(re.compile(r"nflog-\w+ +(?:\"[^\"]*\"|\S+)"), lambda _: "")],
    "TCPMSS": [(re.compile(r"TCPMSS clamp to PMTU|TCPMSS set \d+"), lambda _: "--clamp-mss-to-pmtu")],
}


def _translate(target: str, protocol: str, columns: list[str], rest: str) -> _SaveSyntax:
    """Translate the columns of a rule. Names instead of numbers, unless they are known, have no translation."""
    words, unknown = _translate_columns(protocol, columns)
    target_options: list[str] = []
    goto = "[goto]" in rest
    rest = rest.replace("[goto]", "").strip()
    own = _TARGETS.get(target, [])
    patterns = (*own, *_MATCHES)
    parts = 0
    while rest and parts < MAX_PARTS:
        parts += 1
        # A search for a comment that is not closed would look at the rest of the line from each `/*` anew.
        closed = rest.find("*/", rest.find("/*") + 2) >= 0
        for number, (pattern, translate) in enumerate(patterns):
            match = pattern.match(rest) if closed or pattern is not _LISTED_COMMENT else None
            if match is None or not match[0]:
                continue
            try:
                (target_options if number < len(own) else words).append(translate(match))
            except ValueError:
                # A name that has several meanings, or none that is known.
                unknown.append(match[0])
            rest = rest[match.end() :].strip()
            break
        else:
            # Everything up to the next known part belongs together.
            starts = [
                match.start()
                for pattern, _ in patterns[:-1]
                if (closed or pattern is not _LISTED_COMMENT) and (match := pattern.search(rest))
            ]
            end = min((each for each in starts if each > 0 and rest[each - 1] == " "), default=len(rest))
            unknown.append(rest[:end].strip())
            rest = rest[end:].strip()
    if rest:
        unknown.append(rest)
    if target:
        words.append(f"{'-g' if goto else '-j'} {target}")
    words += target_options
    return _SaveSyntax("".join(f" {word}" for word in words if word), tuple(unknown))


def _translate_columns(protocol: str, columns: list[str]) -> tuple[list[str], list[str]]:
    """Translate the protocol, and the columns [in, out,] source, and destination. Return what has no translation, too."""
    words: list[str] = []
    unknown: list[str] = []
    options = ("-i", "-o", "-s", "-d")[-len(columns) :]
    for option, value in zip(options, columns, strict=True):
        negate, bare = value.startswith("!"), value.lstrip("! ")
        if bare in _ANY and not negate:
            continue
        if option in ("-s", "-d"):
            bare = _ADDRESS_NAMES.get(bare, bare)
            if not re.fullmatch(r"[0-9a-fA-F.:/]+", bare):
                unknown.append(f"{option} {value}")
                continue
        words.append(f"{'! ' if negate else ''}{option} {bare}")
    negate, bare = protocol.startswith("!"), protocol.lstrip("!")
    if bare not in ("all", "0"):
        words.append(f"{'! ' if negate else ''}-p {_PROTOCOL_NUMBERS.get(bare, bare)}")
    return words, unknown
