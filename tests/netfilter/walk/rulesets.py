"""Small rulesets and packets for the tests of the walk."""

from __future__ import annotations

from fractions import Fraction

from narthex.model.net import IPFamily, Protocol
from narthex.model.packet import Host, Packet, Trace
from narthex.netfilter.ast import (
    Chain,
    ElementData,
    ElementKey,
    Expression,
    Field,
    Hook,
    Jump,
    Key,
    MarkOr,
    RandomMatch,
    Rule,
    Ruleset,
    Set,
    Table,
)

HOST = Host(addresses=("10.20.0.11", "10.64.1.1"))
SADDR, DADDR, PROTO, DPORT = Field.SADDR, Field.DADDR, Field.L4PROTO, Field.DPORT


def rule(*expressions: Expression, comment: str = "") -> Rule:
    return Rule(expressions, comment)


def chain(name: str, *rules: Rule) -> Chain:
    return Chain(name=name, rules=rules)


def base(hook: str, *rules: Rule, type: str = "filter", priority: int = 0, policy: str = "accept") -> Chain:
    return Chain(name=hook.upper(), rules=rules, hook=Hook(type=type, hook=hook, priority=priority, policy=policy))


def nat(hook: str, *rules: Rule, priority: int | None = None) -> Chain:
    default = 100 if hook in ("postrouting", "input") else -100
    return base(hook, *rules, type="nat", priority=default if priority is None else priority)


def table(name: str, *chains: Chain, sets: tuple[Set, ...] = (), family: IPFamily | None = IPFamily.IPV4) -> Table:
    return Table(family=family, name=name, chains={c.name: c for c in chains}, sets={s.name: s for s in sets})


def mapping(
    name: str, key: Key, elements: dict[ElementKey, ElementData], data: str = "", interval: bool = False
) -> Set:
    return Set(name=name, key=key, data=data, elements=elements, interval=interval)


def packet(
    destination: str, port: int = 80, source: str = "10.64.1.200", protocol: Protocol = Protocol.TCP, **more: object
) -> Packet:
    return Packet(source=source, destination=destination, port=port, protocol=protocol, **more)  # type: ignore[arg-type]


def ends(trace: Trace) -> dict[tuple[str, str | None, bool], Fraction]:
    return {
        (disposition.value, f"{endpoint[0]}:{endpoint[1]}" if endpoint else None, masquerade): probability
        for (disposition, endpoint, masquerade), probability in trace.ends().items()
    }


def only(trace: Trace) -> tuple[str, str | None, bool]:
    (end,) = ends(trace)
    assert ends(trace)[end] == 1
    return end


def drops(*chains: Chain, sets: tuple[Set, ...] = ()) -> Ruleset:
    return Ruleset((table("filter", *chains, sets=sets),))


SEVEN = tuple(f"172.31.9.{number}" for number in range(52, 59))


def ladder(chains: list[str], probabilities: tuple[str, ...]) -> list[Rule]:
    chances: list[tuple[Expression, ...]] = [(RandomMatch(text),) for text in probabilities]
    return [rule(*chance, Jump(name)) for name, chance in zip(chains, [*chances, ()], strict=True)]


# ---- nftables: rules that stay, maps that hold everything ------------------------------------------------------------

FRONTEND: Key = (DADDR, PROTO, DPORT)


# ---- hooks ---------------------------------------------------------------------------------------------------------


def marks(hook: str, bits: int, **more: object) -> Chain:
    return base(hook, rule(MarkOr(bits)), **more)  # type: ignore[arg-type]


ALL_HOOKS = drops(*(marks(hook, 1) for hook in ("prerouting", "input", "forward", "output", "postrouting")))
