"""The chains that a big cluster has most of: an endpoint's own, and the one that draws an endpoint."""

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
    """Of a chain that sends to one endpoint, with hairpin connections marked."""

    __slots__ = ("_comment", "_endpoint", "_protocol")

    def __init__(self, endpoint: Endpoint, protocol: Protocol, comment: str) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._comment = comment

    def build(self) -> Rules:
        """Built without sorting: these are nearly all the rules there are."""
        end = self._endpoint
        return (
            Rule((Compare(Field.SADDR, (end.address,)), JUMP_MARK), self._comment),
            Rule((PROTOCOLS[self._protocol], Dnat(end.address, end.port)), self._comment),
        )

    def lines(self, chain: str, family: IPFamily) -> list[str]:
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
    """Of a chain that draws one of several others, each with the same chance (row 3.9), behind rules of another kind."""

    __slots__ = ("_comments", "_first", "_ways")

    def __init__(self, first: Rules, ways: tuple[str, ...], comments: tuple[str, ...] = ()) -> None:
        """`ways` are the chains, `comments` one for each of them, or none at all."""
        self._first = first
        self._ways = ways
        self._comments = comments

    def build(self) -> Rules:
        comments = self._comments or ("",) * len(self._ways)
        left = len(self._ways)
        drawn = [
            Rule((_share(left - place), Jump(way)) if left - place > 1 else (Jump(way),), comment)
            for place, (way, comment) in enumerate(zip(self._ways, comments, strict=True))
        ]
        return (*self._first, *drawn)

    def lines(self, chain: str, family: IPFamily) -> list[str]:
        head = f"-A {chain}"
        count = len(self._ways)
        comments = map(comment_words, self._comments) if self._comments else repeat("", count)
        shares = map(_share_words, range(count, 0, -1))
        drawn = zip(comments, shares, chain_words(self._ways), strict=True)
        return [
            *[head + rule_text(rule, family) for rule in self._first],
            *[f"{head}{comment}{share} -j {way}" for comment, share, way in drawn],
        ]

    def __len__(self) -> int:
        return len(self._first) + len(self._ways)

    def __eq__(self, other: object) -> bool:
        if type(other) is DrawRules:
            return (self._ways, self._comments, self._first) == (other._ways, other._comments, other._first)
        return super().__eq__(other)

    __hash__ = LazyRules.__hash__


@lru_cache(maxsize=4096)
def _share(left: int) -> RandomMatch:
    return RandomMatch(equal_share(left))


@lru_cache(maxsize=4096)
def _share_words(left: int) -> str:
    return rule_text(Rule((_share(left),)), IPFamily.IPV4) if left > 1 else ""
