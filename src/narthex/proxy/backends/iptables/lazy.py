"""Compact rules of the most frequent chains of a large cluster: endpoint chains, and chains that select an endpoint."""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat

from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.ast import Compare, Dnat, Field, Jump, RandomMatch, Rule
from narthex.netfilter.lazy import LazyRules
from narthex.netfilter.xtables.print import chain_words, comment_words, host_words, rule_text
from narthex.netfilter.xtables.values import equal_share
from narthex.proxy.backends.iptables.frame import JUMP_MARK, Rules
from narthex.proxy.backends.iptables.names import MARK_MASQ
from narthex.proxy.backends.iptables.refusals import PROTOCOLS
from narthex.proxy.plan.ir import Endpoint


class EndpointRules(LazyRules):
    """Rules of a chain that sends to one endpoint and marks hairpin connections."""

    __slots__ = ("_comment", "_endpoint", "_protocol")

    def __init__(self, endpoint: Endpoint, protocol: Protocol, comment: str) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._comment = comment

    def build(self) -> Rules:
        """Return the rules, built without sorting, because nearly all rules are of this kind."""
        end = self._endpoint
        return (
            Rule((Compare(Field.SADDR, (end.address,)), JUMP_MARK), self._comment),
            Rule((PROTOCOLS[self._protocol], Dnat(end.address, end.port)), self._comment),
        )

    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """Return the rules in the format of iptables-save, without creating them."""
        word = _WORDS[self._protocol]
        source, to = host_words(self._endpoint.address, self._endpoint.port, family)
        comment = comment_words(self._comment)
        return [
            f"-A {chain} -s {source}{comment} -j {MARK_MASQ}",
            f"-A {chain} -p {word}{comment} -m {word} -j DNAT --to-destination {to}",
        ]

    def __len__(self) -> int:
        return 2

    def __eq__(self, other: object) -> bool:
        if type(other) is EndpointRules:
            return (self._endpoint.address, self._endpoint.port, self._protocol, self._comment) == (
                other._endpoint.address,
                other._endpoint.port,
                other._protocol,
                other._comment,
            )
        return super().__eq__(other)

    __hash__ = LazyRules.__hash__


_WORDS = {protocol: protocol.lower for protocol in Protocol}


class DrawRules(LazyRules):
    """Rules of a chain that selects one of several chains with equal probability (row 3.9), after other rules."""

    __slots__ = ("_comments", "_first", "_targets")

    def __init__(self, first: Rules, targets: tuple[str, ...], comments: tuple[str, ...] = ()) -> None:
        """Create rules that jump to the chains `targets`, with one comment for each of them or none."""
        self._first = first
        self._targets = targets
        self._comments = comments

    def build(self) -> Rules:
        """Return the rules."""
        comments = self._comments or ("",) * len(self._targets)
        left = len(self._targets)
        drawn = [
            Rule((_share(left - place), Jump(target)) if left - place > 1 else (Jump(target),), comment)
            for place, (target, comment) in enumerate(zip(self._targets, comments, strict=True))
        ]
        return (*self._first, *drawn)

    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """Return the rules in the format of iptables-save, without creating them."""
        head = f"-A {chain}"
        count = len(self._targets)
        comments = map(comment_words, self._comments) if self._comments else repeat("", count)
        shares = map(_share_words, range(count, 0, -1))
        drawn = zip(comments, shares, chain_words(self._targets), strict=True)
        return [
            *[head + rule_text(rule, family) for rule in self._first],
            *[f"{head}{comment}{share} -j {target}" for comment, share, target in drawn],
        ]

    def __len__(self) -> int:
        return len(self._first) + len(self._targets)

    def __eq__(self, other: object) -> bool:
        if type(other) is DrawRules:
            return (self._targets, self._comments, self._first) == (other._targets, other._comments, other._first)
        return super().__eq__(other)

    __hash__ = LazyRules.__hash__


@lru_cache(maxsize=4096)
def _share(left: int) -> RandomMatch:
    return RandomMatch(equal_share(left))


@lru_cache(maxsize=4096)
def _share_words(left: int) -> str:
    return rule_text(Rule((_share(left),)), IPFamily.IPV4) if left > 1 else ""
