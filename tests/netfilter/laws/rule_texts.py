"""Rulesets of few rules in the words of nft and of iptables, drawn by Hypothesis, which makes those that fail small."""

from functools import cache
from typing import NamedTuple

from hypothesis import strategies as st

OWN = "192.168.1.11"
CLUSTER_IPS = ("10.96.0.1", "10.96.0.2", "10.96.0.7", "10.96.0.19")
ENDPOINTS = ("10.244.1.5", "10.244.2.5")
SENDERS = ("10.244.1.5", "10.244.2.9", "192.0.2.7", OWN)
DESTINATIONS = (*CLUSTER_IPS, *ENDPOINTS, OWN, "127.0.0.1", "224.0.0.1")
NETS = ("10.96.0.0/24", "10.244.0.0/16", "10.96.0.2-10.96.0.9", "0.0.0.0/0")
PORTS = (53, 80, 81, 443, 30080)
PORT_RANGES = ("79-81", "443-30080")
PROTOCOLS = ("tcp", "udp", "sctp")
LINKS = ("eth0", "veth1", "veth*", "lo")
MARKS = (0x1, 0x4000, 0x4001)
LISTS = ("seen-a", "seen-b")
_LONG = (16, 22)
"""Rules of a chain that is split by its addresses and ports at once, least and most."""


class BaseChain(NamedTuple):
    """A base chain that a ruleset may have."""

    table: str
    """The table of iptables."""
    hook: str
    type: str
    priority: int


BASES = (
    BaseChain("raw", "prerouting", "filter", -300),
    BaseChain("raw", "output", "filter", -300),
    BaseChain("mangle", "prerouting", "filter", -150),
    BaseChain("mangle", "input", "filter", -150),
    BaseChain("mangle", "output", "filter", -150),
    BaseChain("mangle", "postrouting", "filter", -150),
    BaseChain("nat", "prerouting", "nat", -100),
    BaseChain("nat", "output", "nat", -100),
    BaseChain("nat", "postrouting", "nat", 100),
    BaseChain("filter", "input", "filter", 0),
    BaseChain("filter", "forward", "filter", 0),
    BaseChain("filter", "output", "filter", 0),
)
"""The base chains of both languages; nftables is given chains of the same types and priorities."""


def _one(*texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


def _joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map("".join)


@cache
def _several(rules: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(rules, min_size=1, max_size=4)


_few = st.integers(0, 7)
_addresses, _nets = _one(*DESTINATIONS), _one(*NETS)
_sources = _one(*SENDERS, "10.244.0.0/16", "192.0.2.0/24")
_ports = st.sampled_from(PORTS).map(str)
_marks = st.sampled_from(MARKS).map("{:#x}".format)
_masks = _one("0x1", "0x4000", "0xc000", "0xffffffff")

# ---- nft ---------------------------------------------------------------------------------------------------------------------

_not = _one("", "", "!= ")
_equal = _one("==", "!=")
_NFT_SETS = """
 set nets {
  type ipv4_addr
  flags interval
  elements = { 10.96.0.1, 10.96.0.4-10.96.0.9, 10.244.0.0/17 }
 }
 set pairs {
  type ipv4_addr . ipv4_addr
  elements = { 10.244.1.5 . 10.244.1.5, 192.0.2.7 . 10.96.0.2 }
 }
 set fronts {
  type ipv4_addr . inet_proto . inet_service
  elements = { 10.96.0.1 . tcp . 80, 10.96.0.2 . udp . 53, 10.96.0.7 . tcp . 443 }
 }
 set ranges {
  type ipv4_addr . inet_service
  flags interval
  elements = { 10.96.0.0/24 . 80-443, 10.244.1.5 . 53 }
 }
 set seen-a {
  type ipv4_addr
  flags dynamic,timeout
  timeout 3h
 }
 set seen-b {
  type ipv4_addr
  flags dynamic,timeout
  timeout 1h
 }
 map ends {
  type ipv4_addr . inet_service : ipv4_addr . inet_service
  elements = { 10.96.0.1 . 80 : 10.244.1.5 . 8080, 10.96.0.2 . 53 : 10.244.2.5 . 53, 10.244.1.5 . 80 : 10.244.1.5 . 80 }
 }
"""
_slots = st.integers(1, 4)


@cache
def nft_matches() -> st.SearchStrategy[str]:
    """Draw one match."""
    return st.one_of(
        _joined(_one("ip daddr "), _not, st.one_of(_addresses, _nets)),
        _joined(_one("ip saddr "), _not, _sources),
        _joined(_one("ip daddr "), _not, _one("{ 10.96.0.1, 10.96.0.7 }", "{ 10.96.0.0/30, 192.168.1.11 }", "@nets")),
        _joined(_one("ip saddr . ip daddr "), _not, _one("@pairs")),
        _joined(_one("ip daddr . meta l4proto . th dport "), _not, _one("@fronts")),
        _joined(_one("ip daddr . th dport "), _not, _one("@ranges")),
        _joined(_one("tcp ", "udp "), _one("dport "), _not, st.one_of(_ports, _one(*PORT_RANGES, "{ 53, 80-90 }"))),
        _joined(_one("th dport "), _not, _ports),
        _joined(_one("meta l4proto "), _not, _one("tcp", "udp", "{ tcp, udp }", "icmp")),
        _joined(_one("iifname "), _not, _one("eth0", "veth*", "lo", "{ eth0, veth1 }")),
        _joined(_one("oifname "), _not, _one("lo")),
        _joined(_one("meta mark & "), _masks, _one(" "), _equal, _one(" "), st.one_of(_one("0x0"), _marks)),
        _joined(_one("meta mark "), _not, _marks),
        _joined(_one("ct mark "), _not, _marks),
        _joined(_one("ct state "), _one("new", "!= new", "established,related", "untracked")),
        _joined(_one("ct status "), _one("dnat", "! dnat", "snat")),
        _joined(_one("ct original ip daddr "), _not, _addresses),
        _joined(_one("fib daddr type "), _not, _one("local", "multicast")),
        _joined(_one("fib saddr type "), _not, _one("local")),
        _joined(_one("ip saddr "), _one("@seen-a", "@seen-b", "!= @seen-a")),
        _one("numgen random mod 2 0", "numgen random mod 3 1"),
    )


@cache
def nft_statements() -> st.SearchStrategy[str]:
    """Draw a statement after which a rule goes on."""
    return st.one_of(
        _joined(_one("meta mark set "), _marks),
        _joined(_one("meta mark set meta mark | "), _marks),
        _joined(_one("meta mark set meta mark ^ "), _marks),
        _joined(_one("meta mark set meta mark & 0xffffbfff")),
        _joined(_one("ct mark set "), _marks),
        _one("ct mark set meta mark", "meta mark set ct mark", "counter"),
        _one("update @seen-a { ip saddr }", "add @seen-b { ip saddr }"),
    )


@cache
def nft_ends(base: BaseChain, further: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Draw what a rule ends with, in a chain that may lead to the `further` ones."""
    found = [_one("accept", "return", "drop", ""), _one("accept", "return", "drop")]
    if base.type == "filter":
        found.append(_one("reject"))
    if base.table == "raw":
        found.append(_one("notrack"))
    if base.type == "nat" and base.hook != "postrouting":
        found += [
            _joined(_one("dnat to "), _one(*ENDPOINTS, *CLUSTER_IPS, OWN)),
            _joined(_one("meta l4proto tcp dnat to "), _one(*ENDPOINTS), _one(":"), _ports),
            _one("meta l4proto { tcp, udp } dnat to ip daddr . th dport map @ends"),
            _one(
                "dnat to numgen random mod 2 map { 0 : 10.244.1.5, 1 : 10.244.2.5 }",
                "meta l4proto tcp redirect to :8080",
            ),
        ]
    if base.hook == "postrouting":
        found.append(_one("masquerade", "snat to 192.168.1.99") if base.type == "nat" else _one("counter"))
    if further:
        chain = _one(*further)
        jump = _joined(_one("jump ", "goto "), chain)
        found += [
            jump,
            jump,
            _joined(_one("ip daddr vmap { 10.96.0.1 : "), jump, _one(", 10.244.0.0/16 : "), jump, _one(" }")),
            _joined(
                _one("ip daddr . meta l4proto . th dport vmap { 10.96.0.1 . tcp . 80 : "),
                jump,
                _one(", 10.96.0.2 . udp . 53 : "),
                st.one_of(jump, _one("drop", "return")),
                _one(" }"),
            ),
            _joined(
                _one("numgen random mod 3 vmap { 0 : "),
                jump,
                _one(", 1-2 : "),
                st.one_of(jump, _one("return")),
                _one(" }"),
            ),
            _joined(_one("meta mark vmap { 0x0 : "), jump, _one(", 0x4000 : "), jump, _one(" }")),
            _joined(_one("ct state vmap { new : "), jump, _one(", established : drop }")),
        ]
    return st.one_of(found)


@cache
@st.composite
def nft_rules(draw: st.DrawFn, base: BaseChain, further: tuple[str, ...]) -> str:
    """Draw a rule: matches and statements in any order, and an end."""
    words = draw(st.lists(st.one_of(nft_matches(), nft_matches(), nft_statements()), max_size=3))
    return " ".join(filter(None, (*words, draw(nft_ends(base, further)))))


@cache
@st.composite
def _long_nft_rules(draw: st.DrawFn, base: BaseChain, further: tuple[str, ...]) -> list[str]:
    """Draw a chain that is split at once: most rules need one address or one port."""
    found = []
    for number in range(draw(st.integers(*_LONG))):
        key = draw(_one(f"ip daddr 10.96.0.{number}", f"ip daddr 10.96.0.{number}", f"tcp dport {80 + number}", "any"))
        if key == "any":
            found.append(draw(nft_rules(base, further)))
        else:
            before = draw(st.one_of(st.just(""), st.just(""), st.just(""), nft_statements(), nft_matches()))
            found.append(
                " ".join(filter(None, (before, key, draw(st.one_of(_one("accept", "drop"), nft_ends(base, further))))))
            )
    return found


@st.composite
def nft_rulesets(draw: st.DrawFn) -> str:
    """Draw a table: some base chains, each with chains of its own."""
    lines = [f"table {draw(_one('ip', 'inet'))} drawn {{{_NFT_SETS}"]
    for base in draw(st.lists(st.sampled_from(BASES), min_size=1, max_size=5, unique=True)):
        names = [f"{base.table}-{base.hook}-{number}" for number in range(draw(st.integers(1, 4)))]
        for at in reversed(range(len(names))):
            lines.append(f" chain {names[at]} {{")
            if at == 0:
                policy = "accept" if base.type == "nat" else draw(_one("accept", "accept", "accept", "drop"))
                lines.append(f"  type {base.type} hook {base.hook} priority {base.priority}; policy {policy};")
            further = tuple(names[at + 1 :])
            long = draw(_few) == 0
            rules = draw(_long_nft_rules(base, further) if long else _several(nft_rules(base, further)))
            lines += [f"  {rule}" for rule in rules]
            lines.append(" }")
    return "\n".join([*lines, "}", ""])


# ---- iptables ----------------------------------------------------------------------------------------------------------------

_no = _one("", "", "! ")


@cache
def save_matches(base: BaseChain) -> st.SearchStrategy[str]:
    """Draw one match, with the protocol that it needs."""
    found = [
        _joined(_no, _one("-d "), st.one_of(_addresses, _one(*NETS[:2]))),
        _joined(_no, _one("-s "), _sources),
        _joined(_no, _one("-p "), _one(*PROTOCOLS, "icmp")),
        _joined(_one("-p tcp -m tcp "), _no, _one("--dport "), st.one_of(_ports, _one("79:81", "443:30080"))),
        _joined(_one("-p udp -m udp "), _no, _one("--dport "), _ports),
        _joined(_one("-p tcp -m multiport "), _no, _one("--dports "), _one("80,443", "53,79:81")),
        _joined(_one("-m mark "), _no, _one("--mark "), st.one_of(_one("0x0"), _marks), _one("/"), _masks),
        _joined(_one("-m connmark "), _no, _one("--mark "), _marks, _one("/"), _masks),
        _joined(
            _one("-m conntrack "),
            _no,
            _one("--ctstate "),
            _one("NEW", "RELATED,ESTABLISHED", "INVALID", "DNAT", "NEW,SNAT"),
        ),
        _joined(_one("-m conntrack "), _no, _one("--ctorigdst "), _addresses),
        _joined(_one("-m addrtype "), _no, _one("--dst-type ", "--src-type "), _one("LOCAL", "MULTICAST")),
        _joined(
            _one("-m iprange "), _no, _one("--dst-range 10.96.0.2-10.96.0.9", "--src-range 10.244.0.0-10.244.1.255")
        ),
        _one("-m statistic --mode random --probability 0.5", "-m statistic --mode nth --every 4 --packet 0"),
        _joined(_one("-m recent --name "), _one(*LISTS), _one(" --rcheck --seconds 3600 --reap --rsource")),
    ]
    if base.hook in ("prerouting", "input", "forward"):
        found.append(_joined(_no, _one("-i "), _one("eth0", "veth1", "veth+", "lo")))
    if base.hook in ("output", "postrouting"):
        found.append(_joined(_no, _one("-o lo")))
    return st.one_of(found)


@cache
def save_targets(base: BaseChain, further: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Draw a target, with the protocol that it needs."""
    found = [_one("-j ACCEPT", "-j RETURN", "-j DROP"), _one("-j ACCEPT", "-j RETURN", "")]
    found += [
        _joined(_one("-j MARK --set-xmark "), _marks, _one("/"), _masks),
        _joined(_one("-j MARK --or-mark ", "-j MARK --xor-mark "), _marks),
        _joined(_one("-m recent --name "), _one(*LISTS), _one(" --set --rsource "), _one("", "-j ACCEPT")),
    ]
    if base.table == "mangle":
        found.append(
            _one("-j CONNMARK --save-mark", "-j CONNMARK --restore-mark", "-j CONNMARK --set-xmark 0x4000/0xff00")
        )
    if base.table == "raw":
        found.append(_one("-j CT --notrack"))
    if base.table == "filter":
        found.append(_one("-j REJECT --reject-with icmp-port-unreachable"))
    if base.type == "nat" and base.hook != "postrouting":
        found += [
            _joined(_one("-j DNAT --to-destination "), _one(*ENDPOINTS, *CLUSTER_IPS, OWN)),
            _joined(_one("-p tcp -j DNAT --to-destination "), _one(*ENDPOINTS), _one(":"), _ports),
            _one("-p tcp -j REDIRECT --to-ports 8080"),
        ]
    if base.hook == "postrouting" and base.type == "nat":
        found.append(_one("-j MASQUERADE", "-j SNAT --to-source 192.168.1.99"))
    if further:
        jump = _joined(_one("-j ", "-j ", "-g "), _one(*further))
        found += [jump, jump, jump]
    return st.one_of(found)


@cache
@st.composite
def save_rules(draw: st.DrawFn, base: BaseChain, further: tuple[str, ...]) -> str:
    """Draw a rule: matches, and a target."""
    words = draw(st.lists(save_matches(base), max_size=3))
    return " ".join(filter(None, (*_compatible(words), draw(save_targets(base, further)))))


def _compatible(words: list[str]) -> list[str]:
    """Return matches without a second one of a kind: iptables takes each address and each protocol once."""
    kept: dict[str, str] = {}
    for each in words:
        kind = next((name for name in ("-d ", "-s ", "-p ", "-i ", "-o ") if name in f"{each} "[:5]), each.split()[1])
        kept.setdefault(kind, each)
    return list(kept.values())


@cache
@st.composite
def _long_save_rules(draw: st.DrawFn, base: BaseChain, further: tuple[str, ...]) -> list[str]:
    found = []
    for number in range(draw(st.integers(*_LONG))):
        key = draw(_one(f"-d 10.96.0.{number}", f"-d 10.96.0.{number}", f"-p tcp -m tcp --dport {80 + number}", "any"))
        if key == "any":
            found.append(draw(save_rules(base, further)))
        else:
            target = draw(save_targets(base, further))
            found.append(f"{key} {target.replace('-p tcp ', '') if '-p tcp' in key else target}")
    return found


@st.composite
def save_rulesets(draw: st.DrawFn) -> str:
    """Draw some tables, each base chain with chains of its own."""
    lines = []
    for table in dict.fromkeys(base.table for base in BASES):
        bases = [base for base in BASES if base.table == table]
        used = [base for base in bases if draw(st.booleans())]
        lines.append(f"*{table}")
        policies = {
            base.hook: "ACCEPT" if table == "nat" else draw(_one("ACCEPT", "ACCEPT", "ACCEPT", "DROP")) for base in used
        }
        lines += [f":{base.hook.upper()} {policies.get(base.hook, 'ACCEPT')} [0:0]" for base in bases]
        body = []
        for base in used:
            names = [base.hook.upper(), *(f"{base.hook}-{number}" for number in range(draw(st.integers(0, 3))))]
            lines += [f":{name} - [0:0]" for name in names[1:]]
            for at, name in enumerate(names):
                further = tuple(names[at + 1 :])
                long = draw(_few) == 0
                rules = draw(_long_save_rules(base, further) if long else _several(save_rules(base, further)))
                body += [f"-A {name} {rule}".rstrip() for rule in rules]
        lines += [*body, "COMMIT"]
    return "\n".join([*lines, ""])
