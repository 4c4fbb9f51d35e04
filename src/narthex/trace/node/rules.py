"""Rules of all tools of one node, put beside each other as the kernel has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from narthex.model.net import FAMILIES, IPFamily
from narthex.netfilter.ast import Chain, Ruleset
from narthex.netfilter.describe import describe_rule
from narthex.netfilter.dump import read as dump
from narthex.netfilter.walk.state import KernelObjects

Texts = Sequence[tuple[str, str]]
"""Names, for messages, and what a tool printed."""


class DumpedRules:
    """The rules of one family, in the form of `narthex.trace.follow.views.Rules`."""

    def __init__(self, held: dump.Dump, family: IPFamily) -> None:
        rules = held.for_family(family)
        self.ruleset: Ruleset = rules.ruleset
        self.objects: KernelObjects = rules.objects
        self.unread = tuple(map(str, held.problems))
        self._dump = held

    def place(self, table: str, chain: str, rule: int, what: str = "") -> tuple[str, str]:
        """Where a rule stood ("nat.txt:214"), and its text; empty when that is not known. iptables-legacy and iptables-nft may
        both have the chain: `what`, the rule printed for people, tells which is meant."""
        having = [each for each in self.ruleset.tables if each.name == table and chain in each.chains]
        if not having:
            return "", ""
        alike = (each for each in having[1:] and having if _printed(each.chains[chain], rule) == what)
        held = next(alike, having[0])
        origin, line, text = self._dump.locate(held, chain, rule)
        return (f"{origin}:{line}" if line else ""), text


def _printed(chain: Chain, rule: int) -> str:
    return describe_rule(chain.rules[rule]) if rule < len(chain.rules) else ""


class RulesByFamily(Mapping[IPFamily, DumpedRules]):
    """Rules by family, read when they are asked for: a dump of 200,000 rules has one family in most cases."""

    def __init__(self, texts: Texts = (), dumps: Sequence[dump.Dump] = ()) -> None:
        """Of texts that are read when they are needed, or of dumps that were read."""
        self._texts = [(name, text) for name, text in texts if _says_something(text)]
        self._dump: dump.Dump | None = dump.merge_dumps(dumps) if dumps else None
        self._held: dict[IPFamily, DumpedRules] = {}

    def __getitem__(self, family: IPFamily) -> DumpedRules:
        if self._dump is None:
            self._dump = dump.merge_dumps(dump.read(text, name, _family(name)) for name, text in self._texts)
        if family not in self._held:
            self._held[family] = DumpedRules(self._dump, family)
        return self._held[family]

    def __iter__(self) -> Iterator[IPFamily]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


def _family(name: str) -> IPFamily | None:
    """What a bundle's file names tell; the rules themselves need not."""
    if name.startswith("rules/ip6tables"):
        return IPFamily.IPV6
    return IPFamily.IPV4 if name.startswith("rules/iptables") else None


def _says_something(text: str) -> bool:
    """Whether a text has more than comments: a tool without rules prints nothing, or a heading."""
    return any(line.strip() and not line.startswith("#") for line in text.split("\n"))
