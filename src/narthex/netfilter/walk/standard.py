"""The structure that kube-proxy's rules always have, for texts that lack a part of it.

A text that a person copied may be a fragment: the output of `grep`, a single chain, a table that ends in the middle. Where such
a text lacks a part that kube-proxy always writes, the walk takes it as kube-proxy writes it, and says so (`Assumed`). Where
the text contradicts the structure, a line is missing or the node has that fault, and the walk decides nothing (`RuleGap`).

The structure is that of kube-proxy 1.18 to 1.36 (pkg/proxy/iptables and pkg/proxy/nftables, `iptablesJumpChains`,
`nftablesBaseChains`, `nftablesJumpChains`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import msgspec

from narthex.model import IPFamily
from narthex.netfilter import ast
from narthex.netfilter.lazy import LazyChains, base_chains
from narthex.netfilter.nft.print import priority_number
from narthex.netfilter.xtables.values import hook_of

KUBE_PROXY_TABLE = "kube-proxy"
_NARTHEX = "narthex"
"""Narthex's own tables in mode nftables."""
SERVICE_IPS = "service-ips"
SERVICE_CHAINS = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-")
"""Prefixes of the chains that belong to one Service or one endpoint."""
CHECK_MAPS = ("no-endpoint-services", "no-endpoint-nodeports", "firewall-ips", "service-nodeports")
"""Maps in which most packets find no element."""
_DISPATCH = ("KUBE-SERVICES", "KUBE-NODEPORTS", "services")
MASQUERADE_BIT = 0x4000
_DROP_BIT = 0x8000
_TOLERANCE = Fraction(1, 10_000)
"""Of probabilities: old versions of kube-proxy wrote five digits."""


class _Jump(NamedTuple):
    """A jump that kube-proxy writes into a base chain."""

    hook: str
    target: str
    new: bool = False
    """Only for new connections."""
    since: bool = False
    """Later versions have it, while earlier ones have the same jump in other chains alone."""
    unless: str = ""
    """A chain of mode ipvs, which does not have the jump."""


_XTABLES_JUMPS: dict[str, tuple[_Jump, ...]] = {
    "nat": (
        _Jump("PREROUTING", "KUBE-SERVICES"),
        _Jump("OUTPUT", "KUBE-SERVICES"),
        _Jump("POSTROUTING", "KUBE-POSTROUTING"),
    ),
    "filter": (
        _Jump("INPUT", "KUBE-PROXY-FIREWALL", new=True),
        _Jump("INPUT", "KUBE-NODEPORTS"),
        _Jump("INPUT", "KUBE-EXTERNAL-SERVICES", new=True),
        _Jump("INPUT", "KUBE-FIREWALL"),
        _Jump("FORWARD", "KUBE-PROXY-FIREWALL", new=True),
        _Jump("FORWARD", "KUBE-FORWARD"),
        _Jump("FORWARD", "KUBE-SERVICES", new=True),
        _Jump("FORWARD", "KUBE-EXTERNAL-SERVICES", new=True, since=True),
        _Jump("OUTPUT", "KUBE-PROXY-FIREWALL", new=True, unless="KUBE-NODE-PORT"),
        _Jump("OUTPUT", "KUBE-SERVICES", new=True),
        _Jump("OUTPUT", "KUBE-FIREWALL"),
    ),
}
_NFT_JUMPS = (
    _Jump("prerouting", "firewall-check", new=True),
    _Jump("output", "firewall-check", new=True),
    _Jump("prerouting", "services"),
    _Jump("output", "services"),
    _Jump("postrouting", "masquerading"),
    _Jump("input", "nodeport-endpoints-check", new=True),
    _Jump("input", "service-endpoints-check", new=True),
    _Jump("forward", "service-endpoints-check", new=True),
    _Jump("output", "service-endpoints-check", new=True),
    _Jump("forward", "cluster-ips-check", new=True),
    _Jump("output", "cluster-ips-check", new=True),
)
_NFT_NAT = ("services", "masquerading")
"""Targets that only base chains of type nat call."""
_NFT_PRIORITIES = {"firewall-check": "dstnat - 10", "services": "dstnat", "masquerading": "srcnat"}

_NEW = ast.CtState(("new",))
_FRONTEND: ast.Key = (ast.Field.DADDR, ast.Field.L4PROTO, ast.Field.DPORT)
_PORT: ast.Key = (ast.Field.L4PROTO, ast.Field.DPORT)
_MARKED = ast.MarkIs(MASQUERADE_BIT, MASQUERADE_BIT)
_XTABLES_CHAINS: dict[str, tuple[tuple[ast.Expression, ...], ...]] = {
    "KUBE-MARK-MASQ": ((ast.MarkOr(MASQUERADE_BIT),),),
    "KUBE-MARK-DROP": ((ast.MarkOr(_DROP_BIT),),),
    "KUBE-POSTROUTING": ((_MARKED, ast.MarkXor(MASQUERADE_BIT), ast.Masquerade()),),
}
"""Chains whose content is the same on every node."""
_NFT_CHAINS: dict[str, tuple[tuple[ast.Expression, ...], ...]] = {
    "mark-for-masquerade": ((ast.MarkOr(MASQUERADE_BIT),),),
    "masquerading": ((_MARKED, ast.MarkXor(MASQUERADE_BIT), ast.Masquerade()),),
    "reject-chain": ((ast.RejectPacket(),),),
    "firewall-check": ((ast.VerdictMap(_FRONTEND, "firewall-ips"),),),
    "service-endpoints-check": ((ast.VerdictMap(_FRONTEND, "no-endpoint-services"),),),
    "nodeport-endpoints-check": ((ast.IsLocal(ast.Field.DADDR), ast.VerdictMap(_PORT, "no-endpoint-nodeports")),),
    "services": (
        (ast.VerdictMap(_FRONTEND, SERVICE_IPS),),
        (ast.IsLocal(ast.Field.DADDR), ast.VerdictMap(_PORT, "service-nodeports")),
    ),
}


def is_dispatch(chain: str) -> bool:
    """Return True for a chain of kube-proxy that decides where a packet goes, so that nothing can be said without it."""
    return chain in _DISPATCH or chain.startswith(SERVICE_CHAINS) or "/" in chain


def is_proxy_chain(table: str, chain: str) -> bool:
    """Return True for a chain of kube-proxy, which refuses packets only if no other rule of it rewrites them."""
    return table == KUBE_PROXY_TABLE or chain.startswith("KUBE-")


class CompletedTable(NamedTuple):
    """A table with the parts of kube-proxy's structure that its text lacks."""

    table: ast.Table
    shifts: Mapping[str, int]
    """The number of rules that were put before those of the text, by chain."""


def complete(table: ast.Table) -> CompletedTable:
    """Return a table of a copied text, completed. Chains are built when they are accessed, as before."""
    if table.name in _XTABLES_JUMPS and table.family is not None:
        return _Completion(table, _XTABLES_JUMPS[table.name], _XTABLES_CHAINS).result()
    if table.name == KUBE_PROXY_TABLE:
        return _Completion(table, _NFT_JUMPS, _NFT_CHAINS).result()
    return CompletedTable(table, {})


class _Completion:
    """Completes one table."""

    def __init__(
        self, table: ast.Table, jumps: tuple[_Jump, ...], contents: Mapping[str, tuple[tuple[ast.Expression, ...], ...]]
    ) -> None:
        self._table = table
        self._jumps = jumps
        self._contents = contents
        self._nft = table.name == KUBE_PROXY_TABLE
        self._words = f"table {table.name}"
        self._bases = list(base_chains(table.chains))
        self._made: dict[str, ast.Chain] = {}
        self._before: dict[str, list[ast.Rule]] = {}
        """Rules to put in front of the chains of the text."""
        self._shifts: dict[str, int] = {}

    def result(self) -> CompletedTable:
        """Return the completed table."""
        if not (self._nft or any(name.startswith("KUBE-") for name in self._table.chains)):
            return CompletedTable(self._table, {})
        for name, rules in self._contents.items():
            if name not in self._table.chains and self._has_maps(rules):
                text = f"chain {name} of {self._words} is not in the input; it is taken to be as kube-proxy writes it"
                self._made[name] = ast.Chain(name=name, rules=tuple(_assumed(text, *rule) for rule in rules))
        for jump in self._jumps:
            self._complete_jump(jump)
        names = (*self._table.chains, *(name for name in self._made if name not in self._table.chains))
        bases = (*(chain.name for chain in self._bases), *(each.name for each in self._made.values() if each.hook))
        self._shifts |= {name: len(chain.rules) for name, chain in self._made.items()}
        chains = LazyChains(names, self._build, bases, lambda _: [], lambda _: "")
        return CompletedTable(msgspec.structs.replace(self._table, chains=chains), self._shifts)

    def _has_maps(self, rules: tuple[tuple[ast.Expression, ...], ...]) -> bool:
        return _maps(rules[:1]) <= set(self._table.sets)

    def _known(self, name: str) -> bool:
        return name in self._table.chains or name in self._made

    def _complete_jump(self, jump: _Jump) -> None:
        if not self._known(jump.target) or (jump.unless and self._known(jump.unless)):
            return
        bases = [chain for chain in self._bases if self._is_base(chain, jump)]
        if any(jump.target in chain.targets for chain in bases):
            return
        matches = (_NEW,) if jump.new else ()
        if not bases or self._table.partial:
            text = (
                f"nothing in the input calls {jump.target} of {self._words} in {jump.hook.lower()}; the jump is taken to be "
                "there, as kube-proxy writes it"
            )
            self._add(jump, bases, _assumed(text, *matches, ast.Jump(jump.target)))
        elif (
            self._table.name == "filter"
            and (jump.hook, jump.target) == ("FORWARD", "KUBE-SERVICES")
            and any(jump.target in each.targets for each in self._bases)
        ):
            for rule in self._refusals(jump) if jump.target in self._table.chains else ():
                self._add(jump, bases, rule)
        elif self._table.name == "nat" or self._nft or self._is_needed(jump):
            text = (
                f"{self._words} does not call {jump.target} in {jump.hook.lower()}, and kube-proxy always does: a line is "
                "missing, or the node has this fault"
            )
            self._add(jump, bases, ast.Rule((ast.RuleGap(text), *matches, ast.Jump(jump.target))))

    def _is_needed(self, jump: _Jump) -> bool:
        """Return True for a jump of table filter that a base chain lacks: others have it, or nothing calls its target."""
        if any(jump.target in each.targets for each in self._bases):
            return not jump.since
        return not any(jump.target in self._table.chains[name].targets for name in self._table.chains)

    def _refusals(self, jump: _Jump) -> Iterator[ast.Rule]:
        """Yield what KUBE-SERVICES refuses, for a FORWARD that does not call it as kube-proxy since 1.14 does.

        Only for a packet that it refuses it matters whether a line is missing.
        """
        text = f"{self._words} does not call {jump.target} in {jump.hook.lower()}, and kube-proxy does: a line may be missing"
        for rule in self._table.chains[jump.target].rules:
            if rule.expressions and isinstance(rule.expressions[-1], (ast.RejectPacket, ast.DropPacket)):
                *matches, verdict = rule.expressions
                yield ast.Rule((_NEW, *matches, ast.RuleGap(text), verdict))

    def _is_base(self, chain: ast.Chain, jump: _Jump) -> bool:
        assert chain.hook is not None
        if not self._nft:
            return chain.name == jump.hook
        return chain.hook.hook == jump.hook and (chain.hook.type == "nat") == (jump.target in _NFT_NAT)

    def _add(self, jump: _Jump, bases: list[ast.Chain], rule: ast.Rule) -> None:
        """Put a rule in front of the base chain, which is made if the text has none."""
        if bases:
            self._before.setdefault(bases[0].name, []).append(rule)
            self._shifts[bases[0].name] = len(self._before[bases[0].name])
            return
        name, hook = jump.hook, hook_of(self._table.name, jump.hook)
        if self._nft:
            nat = jump.target in _NFT_NAT
            name = f"{'nat' if nat else 'filter'}-{jump.hook}" + (
                "-pre-dnat" if jump.target == "firewall-check" else ""
            )
            priority = priority_number(_NFT_PRIORITIES.get(jump.target, "filter").split())
            hook = ast.Hook(type="nat" if nat else "filter", hook=jump.hook, priority=priority)
        held = self._made.get(name)
        rules = (*held.rules, rule) if held is not None else (rule,)
        self._made[name] = ast.Chain(name=name, rules=rules, hook=hook)

    def _build(self, name: str) -> ast.Chain:
        made = self._made.get(name)
        if made is not None:
            return made
        chain = self._table.chains[name]
        rules = self._contents.get(name)
        if rules is not None and not chain.rules:
            text = f"chain {name} of {self._words} has no rule in the input; it is taken to be as kube-proxy writes it"
            return msgspec.structs.replace(chain, rules=tuple(_assumed(text, *rule) for rule in rules))
        before = [*self._before.get(name, ()), *self._contradictions(chain), *self._lost_dispatch(chain)]
        after = [*self._node_ports(chain), *self._uncalled_external(chain)]
        if not before and not after:
            return chain
        self._shifts[name] = len(before)
        return msgspec.structs.replace(chain, rules=(*before, *chain.rules, *after))

    def _contradictions(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield a gap if a chain lacks rules that kube-proxy writes into every such chain."""
        maps = set(self._table.sets)
        what = _nft_flaw(chain, maps) if self._nft else _xtables_flaw(chain) or self._endpoint_left_out(chain)
        if what:
            yield ast.Rule(
                (ast.RuleGap(f"chain {chain.name} of {self._words} {what}: lines of the input are missing"),)
            )

    @cached_property
    def _uncalled(self) -> Mapping[str, str]:
        """The chains of endpoints and of external traffic that no rule calls, each with the name in its comments."""
        chains = self._table.chains
        names = [name for name in chains if name.startswith(SERVICE_CHAINS) or name in _DISPATCH]
        if self._nft or len(names) > _MAX_COMPARED:
            return {}
        called = {target for name in names for target in chains[name].targets}
        lost = (name for name in names if name.startswith(("KUBE-SEP-", "KUBE-EXT-")) and name not in called)
        return {name: _named(chains[name]) for name in lost if chains[name].rules}

    def _endpoint_left_out(self, chain: ast.Chain) -> str:
        """Return the flaw of a Service's chain that does not send to an endpoint whose comments name the Service."""
        name = _named(chain) if chain.name.startswith(("KUBE-SVC-", "KUBE-SVL-")) else ""
        other = name and next(
            (each for each, named in self._uncalled.items() if named == name and each.startswith("KUBE-SEP-")), ""
        )
        return f"does not send to {other}, an endpoint of {name}" if other else ""

    def _uncalled_external(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield a gap at the end of KUBE-NODEPORTS if no rule calls a chain that may belong to a node port."""
        if chain.name != "KUBE-NODEPORTS" or self._table.name != "nat" or "KUBE-SERVICES" not in self._table.chains:
            return
        other = next((name for name in self._uncalled if name.startswith("KUBE-EXT-")), "")
        if other:
            text = f"no rule of the input calls {other} of {self._words}: lines of the input are missing"
            yield ast.Rule((ast.RuleGap(text),))

    def _lost_dispatch(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield a gap for each Service port whose packets are marked and that no rule of the text sends on.

        Every version of kube-proxy writes the rule that marks packets from outside of the cluster with the same address and
        port as the rule that calls the Service's chain: before it, or since 1.22 in that chain. For a node port, 1.18 writes
        both into KUBE-NODEPORTS.
        """
        if self._nft or self._table.name != "nat" or chain.name not in ("KUBE-SERVICES", "KUBE-NODEPORTS"):
            return
        sent = {_frontend(rule) for rule in chain.rules if rule.target.startswith(SERVICE_CHAINS)}
        marked = {_frontend(rule) for rule in chain.rules if rule.target == "KUBE-MARK-MASQ"}
        if chain.name == "KUBE-SERVICES":
            names = [name for name in self._table.chains if name.startswith("KUBE-SVC-")]
            for name in names if len(names) <= _MAX_COMPARED else ():
                marked |= {
                    _frontend(each) for each in self._table.chains[name].rules if each.target == "KUBE-MARK-MASQ"
                }
        elif not any(name.startswith("KUBE-EXT-") for name in self._table.chains):
            plain = {_frontend(each) for each in chain.rules if each.target.startswith("KUBE-SVC-")}
            marked |= plain
            sent &= {_frontend(each) for each in chain.rules if each.target == "KUBE-MARK-MASQ"} | (sent - plain)
        for frontend in marked - sent:
            if frontend and any(each.field is ast.Field.DPORT for each in frontend):
                text = (
                    f"a rule of chain {chain.name} for this address and port is missing: lines of the input are missing"
                )
                yield ast.Rule((*frontend, ast.RuleGap(text)))

    def _node_ports(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield the last rule of KUBE-SERVICES, which calls KUBE-NODEPORTS, if the text lacks it.

        kube-proxy leaves it out on a node without an address for node ports.
        """
        if chain.name != "KUBE-SERVICES" or self._table.name != "nat" or "KUBE-NODEPORTS" not in self._table.chains:
            return
        if "KUBE-NODEPORTS" in chain.targets:
            return
        text = f"nothing in the input calls KUBE-NODEPORTS of {self._words}"
        local, jump = ast.IsLocal(ast.Field.DADDR), ast.Jump("KUBE-NODEPORTS")
        if not self._bases or self._table.partial:
            yield _assumed(f"{text}; the jump is taken to be there, as kube-proxy writes it", local, jump)
        else:
            text += ": a line is missing, or no address of the node is one for node ports (nodePortAddresses)"
            yield ast.Rule((ast.RuleGap(text), local, jump))


def _assumed(text: str, *expressions: ast.Expression) -> ast.Rule:
    return ast.Rule((ast.Assumed(text), *expressions))


_MAX_COMPARED = 2000
"""Service ports of a text whose chains are compared with KUBE-SERVICES. A text that a person copied has fewer."""
_FRONTEND_FIELDS = (ast.Field.DADDR, ast.Field.L4PROTO, ast.Field.DPORT)


def _frontend(rule: ast.Rule) -> tuple[ast.Compare, ...]:
    """Return the matches of destination, protocol, and port of a rule."""
    found = {each.field: each for each in rule.expressions if isinstance(each, ast.Compare) and not each.negate}
    return tuple(found[field] for field in _FRONTEND_FIELDS if field in found)


def _named(chain: ast.Chain) -> str:
    """Return the Service port that the comments of a chain of kube-proxy name."""
    comments = (rule.comment.partition(" -> ")[0] for rule in reversed(chain.rules))
    return next((comment for comment in comments if "/" in comment and " " not in comment), "")


# ---- chains that contradict the structure ---------------------------------------------------------------------------

_NOT_READ = (ast.Unknown, ast.Undecoded, ast.RuleGap)


def _has(chain: ast.Chain, *kinds: type) -> bool:
    return any(isinstance(each, kinds) for rule in chain.rules for each in rule.expressions)


def _xtables_flaw(chain: ast.Chain) -> str:
    if _has(chain, *_NOT_READ):
        return ""
    return next((check(chain) for prefixes, check in _XTABLES_CHECKS if chain.name.startswith(prefixes)), "")


def _endpoint_flaw(chain: ast.Chain) -> str:
    if not _has(chain, ast.Dnat):
        return "has no rule that rewrites the destination"
    return "" if "KUBE-MARK-MASQ" in chain.targets else "has no rule that marks what the endpoint sends to itself"


def _service_flaw(chain: ast.Chain) -> str:
    """Check the probabilities of the endpoints: 1/n, 1/(n-1), …, and the last without any (row 3.9)."""
    spread = [
        rule
        for rule in chain.rules
        if rule.target.startswith("KUBE-SEP-")
        and not any(isinstance(each, ast.RecentCheck) for each in rule.expressions)
    ]
    if not spread:
        return "has no rule that sends to an endpoint"
    for left, rule in zip(range(len(spread), 0, -1), spread, strict=True):
        random = next((each for each in rule.expressions if isinstance(each, ast.RandomMatch)), None)
        probability = Fraction(random.probability) if random is not None else Fraction(1)
        if abs(probability - Fraction(1, left)) > _TOLERANCE:
            return f"has {len(spread)} endpoints, with probabilities of another number"
    return ""


def _external_flaw(chain: ast.Chain) -> str:
    if not chain.rules:
        return "has no rule"
    if all(target == "KUBE-MARK-MASQ" for target in chain.targets) and not _has(chain, ast.DropPacket):
        return "has no rule that leads to an endpoint"
    return "" if "KUBE-MARK-MASQ" in chain.targets else "has no rule that marks what is to be masqueraded"


def _postrouting_flaw(chain: ast.Chain) -> str:
    """Check that the chain masquerades, and only what is marked."""
    if not _has(chain, ast.Masquerade, ast.Snat):
        return "has no rule that masquerades"
    return "" if _has(chain, ast.MarkIs) else "masquerades what is not marked"


_XTABLES_CHECKS: tuple[tuple[tuple[str, ...], Callable[[ast.Chain], str]], ...] = (
    (("KUBE-SEP-",), _endpoint_flaw),
    (("KUBE-SVC-", "KUBE-SVL-"), _service_flaw),
    (("KUBE-EXT-",), _external_flaw),
    (("KUBE-POSTROUTING",), _postrouting_flaw),
)


def _maps(rules: Iterable[tuple[ast.Expression, ...]]) -> set[str]:
    """Return the verdict maps that rules look up."""
    return {each.map for rule in rules for each in rule if isinstance(each, ast.VerdictMap)}


_SPREADS = (ast.RandomGoto, ast.RandomMap, ast.VerdictMap, ast.InlineVerdictMap)


def _nft_flaw(chain: ast.Chain, maps: set[str]) -> str:
    if _has(chain, *_NOT_READ):
        return ""
    if chain.name == "masquerading":
        return _postrouting_flaw(chain)
    lacks = maps & _maps(_NFT_CHAINS.get(chain.name, ())) - _maps(rule.expressions for rule in chain.rules)
    if lacks:
        return f"does not look up the map {min(lacks)}"
    if chain.name.startswith("endpoint-") and not _has(chain, ast.Dnat):
        return "has no rule that rewrites the destination"
    if chain.name.startswith("external-") and not any("/" in target for target in chain.targets):
        return "has no rule that sends to the Service"
    if chain.name.startswith(("service-", "local-")) and not _has(chain, *_SPREADS):
        return "has no rule that sends to an endpoint"
    return ""


# ---- what is missing as a whole -------------------------------------------------------------------------------------


def absent_parts(ruleset: ast.Ruleset, family: IPFamily, has_servers: bool) -> tuple[str, str]:
    """Return why the rules may rewrite, and may refuse, a packet that no known rule does; "" where the text has them all.

    `has_servers` is True if virtual servers of IPVS are known.
    """
    if not ruleset.copied:
        return "", ""
    held = {table.name: table for table in ruleset.tables if table.family in (None, family)}
    own = held.get(KUBE_PROXY_TABLE)
    if own is not None:
        partial = own.partial and f"table {KUBE_PROXY_TABLE}: {own.partial}"
        lacks = [f"the map {name}" for name in (SERVICE_IPS,) if name not in own.sets]
        lacks += [f"the map {name}" for name in ("no-endpoint-services", "firewall-ips") if name not in own.sets]
        return (
            partial
            or (f"{lacks[0]} of table {KUBE_PROXY_TABLE} is not in the input" if SERVICE_IPS not in own.sets else ""),
            partial or (f"{lacks[0]} of table {KUBE_PROXY_TABLE} is not in the input" if lacks else ""),
        )
    if any(name.startswith(_NARTHEX) for name in held):
        return "", ""
    if not any(name in _XTABLES_JUMPS for name in held):
        return ("", "") if has_servers else ("no rules of a Service proxy are in the input",) * 2
    return _incomplete(ruleset, held, "nat"), _incomplete(ruleset, held, "filter")


def _incomplete(ruleset: ast.Ruleset, held: Mapping[str, ast.Table], name: str) -> str:
    if name not in held:
        return ruleset.absent.get(name) or f"table {name} of iptables is not in the input"
    return ruleset.absent.get(name) or (held[name].partial and f"table {name}: {held[name].partial}")
