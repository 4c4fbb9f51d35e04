"""Signs that lines are missing from a copied text, though nothing in it says so.

Whatever kube-proxy writes fits together: something calls each chain of a Service, every chain of a kind has the same kinds of
rules, and each cluster IP is in a map. Where a text does not fit together, lines of it are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property

from narthex.model import IPFamily, contains
from narthex.netfilter import ast
from narthex.netfilter.walk.element_losses import MISSING, ElementSigns, rewrites
from narthex.netfilter.walk.structure import (
    CLUSTER_IPS,
    CLUSTER_IPS_CHECK,
    DISPATCH,
    HAIRPINS,
    KUBE_PROXY_TABLE,
    MASQUERADE_BIT,
    NARTHEX,
    NFT_CHAINS,
    NFT_JUMPS,
    SERVICE_CHAINS,
    SERVICE_IPS,
    SERVICE_PORT_CHAINS,
    XTABLES_JUMPS,
    is_service_chain,
)

_MAX_COMPARED = 2000
"""Chains of Services that are compared with each other. A text that a person copied has fewer."""
_TOLERANCE = Fraction(1, 10_000)
"""Of probabilities: old versions of kube-proxy wrote five digits."""
_FRONTEND_FIELDS = (ast.Field.DADDR, ast.Field.L4PROTO, ast.Field.DPORT)
_SENDERS = (ast.Field.SADDR, ast.Field.IIFNAME)
_OF_CLUSTER_IPS = ("KUBE-SVC-", "KUBE-SVL-", *SERVICE_PORT_CHAINS)
"""Chains that kube-proxy sends packets for cluster IPs to."""
_EXTERNAL = ("KUBE-EXT-", "external-")
_MARKING = ("KUBE-MARK-MASQ", "mark-for-masquerade")
_LOCAL_RULES = ("pod traffic", "masquerade local traffic", "route local traffic|short-circuit local traffic")
"""Words of the comments of the rules that a chain of external traffic has with policy Local, for pods and for the node."""


class LossSigns:
    """Finds in a table of kube-proxy what shows that lines of it are missing."""

    def __init__(self, table: ast.Table) -> None:
        self._table = table
        self._chains = table.chains
        self._nft = table.name == KUBE_PROXY_TABLE
        self._words = f"table {table.name}"

    @cached_property
    def lost(self) -> str:
        """The first sign that lines are missing anywhere in the table, or ""."""
        if self._table.partial:
            return ""
        for name in self._names:
            chain = self._chains[name]
            if name not in self._called:
                # In mode nftables, kube-proxy empties a chain that nothing calls any more, and deletes it later.
                if self._nft and not chain.rules:
                    continue
                return f"no rule of the input calls chain {name} of {self._words}: {MISSING}"
            if what := self.flaw(chain):
                return f"chain {name} of {self._words} {what}: {MISSING}"
        forward = self._chains.get("KUBE-FORWARD")
        if forward is not None and not _accepts_marked(forward):
            return f"chain KUBE-FORWARD of {self._words} has no rule that accepts what is marked: {MISSING}"
        if self._marks_no_cluster_ip:
            return f"no rule of {self._words} marks packets for cluster IPs, though others tell pods from outside: {MISSING}"
        lost = self._elements.lost
        return f"{lost}: {MISSING}" if lost else self._lost_refusals()

    def flaw(self, chain: ast.Chain) -> str:
        """Return what a chain lacks that kube-proxy writes into every such chain, or ""."""
        if _has(chain, *_NOT_READ):
            return ""
        if self._nft:
            return _nft_flaw(chain, set(self._table.sets)) or self._external_flaw(chain)
        flaw = next((check(chain) for prefixes, check in _XTABLES_CHECKS if chain.name.startswith(prefixes)), "")
        return flaw or self._external_flaw(chain) or self._endpoint_left_out(chain)

    def lost_dispatch(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield a gap for each Service port of which KUBE-SERVICES or KUBE-NODEPORTS has one of two rules.

        Every version of kube-proxy writes the rule that marks packets from outside of the cluster with the same address and
        port as the rule that calls the Service's chain: before it, or since 1.22 in that chain. For a node port, 1.18 writes
        both into KUBE-NODEPORTS.
        """
        if self._nft or self._table.name != "nat" or chain.name not in ("KUBE-SERVICES", "KUBE-NODEPORTS"):
            return
        calls = [rule for rule in chain.rules if rule.target.startswith(SERVICE_CHAINS)]
        sent = {_frontend(rule) for rule in calls}
        marked = {_frontend(rule) for rule in chain.rules if rule.target == "KUBE-MARK-MASQ"}
        unmarked: set[_Frontend] = set()
        if chain.name == "KUBE-SERVICES":
            marked |= {_frontend(rule) for rule in self._cluster_ip_marks}
            if self._cluster_ip_marks or self._marks_no_cluster_ip:
                unmarked = {_frontend(rule) for rule in calls if rule.comment.endswith(" cluster IP")} - marked
        elif not any(name.startswith("KUBE-EXT-") for name in self._chains):
            plain = {_frontend(each) for each in chain.rules if each.target.startswith("KUBE-SVC-")}
            sent &= marked | (sent - plain)
            marked |= plain
        for frontend in (marked - sent) | unmarked:
            if frontend and any(each.field is ast.Field.DPORT for each in frontend):
                text = f"a rule of chain {chain.name} for this address and port is missing: {MISSING}"
                if frontend in unmarked:
                    text = f"the rule that marks packets for this address and port is missing: {MISSING}"
                yield ast.Rule((*frontend, ast.RuleGap(text)))

    def doubtful(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield what a packet in a Service's chain assumes where the text is as one with a missing line, but can be whole."""
        yield from self._elements.doubtful(chain)
        if not is_service_chain(chain.name):
            return
        if chain.name.startswith(_OF_CLUSTER_IPS) and not self._cluster_ip_marks:
            text = f"kube-proxy masquerades no packet for a cluster IP: no rule of {self._words} marks one"
            yield ast.Rule((ast.MarkIs(0, MASQUERADE_BIT), ast.Assumed(text)))
        if chain.name.startswith(_EXTERNAL) and not self._knows_pods and _local_rules(chain)[1:] == [True, True]:
            text = f"kube-proxy does not tell pods from other senders: no rule of {self._words} does"
            yield ast.Rule((ast.Assumed(text),))
        local = self._chains.get(chain.name.replace("KUBE-SVC-", "KUBE-SVL-"))
        if local is not None and local.name != chain.name:
            for target in sorted(set(local.targets) - set(chain.targets)):
                text = f"chain {chain.name} of {self._words} sends nothing to {target}, unlike {local.name}"
                yield ast.Rule((ast.Assumed(text),))

    @cached_property
    def _names(self) -> list[str]:
        """The chains of Services and endpoints; none if they are too many."""
        names = [name for name in self._chains if is_service_chain(name)]
        return names if len(names) <= _MAX_COMPARED else []

    @cached_property
    def _elements(self) -> ElementSigns:
        return ElementSigns(self._table, self._names if self._nft else [])

    @cached_property
    def _called(self) -> set[str]:
        """The chains that a rule or a map element calls."""
        callers = (*self._names, *(name for name in DISPATCH if name in self._chains))
        called = {target for name in callers for rule in self._chains[name].rules for target in _targets(rule)}
        for one in self._table.sets.values() if self._nft else ():
            called |= {data.chain for data in one.elements.values() if isinstance(data, (ast.Goto, ast.Jump))}
        return called

    @cached_property
    def _cluster_ip_marks(self) -> list[ast.Rule]:
        """The rules that mark packets for cluster IPs to be masqueraded."""
        names = [name for name in ("KUBE-SERVICES", "services") if name in self._chains]
        names += (name for name in self._names if name.startswith(_OF_CLUSTER_IPS))
        rules = (rule for name in names for rule in self._chains[name].rules)
        return [rule for rule in rules if _marks(rule) and (self._nft or _frontend(rule))]

    @cached_property
    def _knows_pods(self) -> bool:
        """Whether the rules tell pods of the node or the cluster from other senders."""
        return any(True for _ in self._sender_matches())

    def _sender_matches(self) -> Iterator[ast.Compare]:
        """Yield the matches that leave pods out where rules mark packets for cluster IPs."""
        for rule in self._cluster_ip_marks:
            for each in rule.expressions:
                if isinstance(each, ast.Compare) and each.negate and each.field in _SENDERS:
                    yield each

    def pod_networks(self) -> frozenset[str]:
        """Return the networks of pods that the rules name."""
        found = (each.values for each in self._sender_matches() if each.field is ast.Field.SADDR)
        return frozenset(str(value) for values in found for value in values)

    def is_endpoint(self, address: str, port: int) -> bool:
        """Return True for an endpoint of a Service, and for an address in a network of pods."""
        return (address, port) in self._endpoints or any(contains(each, address) for each in self.pod_networks())

    @cached_property
    def _endpoints(self) -> frozenset[tuple[str, int | None]]:
        return frozenset((each.address, each.port) for name in self._names for each in rewrites(self._chains[name]))

    @cached_property
    def _marks_no_cluster_ip(self) -> bool:
        """Whether rules of policy Local know pods, and no rule masquerades what others send to a cluster IP."""
        external = (name for name in self._names if name.startswith(_EXTERNAL))
        comments = (rule.comment for name in external for rule in self._chains[name].rules)
        return not self._cluster_ip_marks and any(_LOCAL_RULES[0] in comment for comment in comments)

    def _external_flaw(self, chain: ast.Chain) -> str:
        """Check the rules of policy Local: all of them, and the one for pods if the rules know pods."""
        if not chain.name.startswith(_EXTERNAL):
            return ""
        if not any(map(_marks, chain.rules)):
            return "has no rule that marks what is to be masqueraded"
        of_pods, marks, routes = found = _local_rules(chain)
        if not any(found):
            return ""
        if not (marks and routes):
            return "lacks a rule for packets of the node itself"
        return "lacks the rule for packets of pods" if self._knows_pods and not of_pods else ""

    def _endpoint_left_out(self, chain: ast.Chain) -> str:
        """Return the flaw of a Service's chain that does not send to an endpoint whose comments name the Service."""
        if not chain.name.startswith(("KUBE-SVC-", "KUBE-SVL-")):
            return ""
        name = _named(chain)
        other = name and next((each for each, named in self._lost_endpoints.items() if named == name), "")
        return f"does not send to {other}, an endpoint of {name}" if other else ""

    @cached_property
    def _lost_endpoints(self) -> Mapping[str, str]:
        """The chains of endpoints that no rule calls, each with the name in its comments."""
        lost = (name for name in self._names if name.startswith("KUBE-SEP-") and name not in self._called)
        return {name: _named(self._chains[name]) for name in lost}

    def _lost_refusals(self) -> str:
        """Return a Service port without endpoints that is refused for external addresses and not for its cluster IP."""
        if not {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES"} <= set(self._chains):
            return ""
        inside, outside = (
            {rule.comment.partition(" has no ")[0] for rule in self._chains[name].rules if words in rule.comment}
            for name, words in (("KUBE-SERVICES", " has no "), ("KUBE-EXTERNAL-SERVICES", " has no endpoints"))
        )
        lost = sorted(outside - inside)
        return (
            f"chain KUBE-SERVICES of {self._words} does not refuse {lost[0]}, which has no endpoints: {MISSING}"
            if lost
            else ""
        )


_Frontend = tuple[ast.Compare, ...]


def _frontend(rule: ast.Rule) -> _Frontend:
    """Return the matches of destination, protocol, and port of a rule."""
    found = {each.field: each for each in rule.expressions if isinstance(each, ast.Compare) and not each.negate}
    return tuple(found[field] for field in _FRONTEND_FIELDS if field in found)


def exact_destinations(rule: ast.Rule) -> Iterator[str]:
    """Yield the single addresses of which a rule matches the destination."""
    for each in rule.expressions:
        if isinstance(each, ast.Compare) and each.field is ast.Field.DADDR and not each.negate:
            yield from (
                address for value in each.values if "-" not in (address := _single(str(value))) and "/" not in address
            )


def _local_rules(chain: ast.Chain) -> list[bool]:
    """Return for each of `_LOCAL_RULES` whether the chain has it."""
    comments = [rule.comment.lower() for rule in chain.rules]
    return [any(word in comment for comment in comments for word in words.split("|")) for words in _LOCAL_RULES]


def _single(value: str) -> str:
    return value.removesuffix("/128" if ":" in value else "/32")


def _marks(rule: ast.Rule) -> bool:
    return rule.target in _MARKING or _has_any(rule, ast.MarkOr)


def _named(chain: ast.Chain) -> str:
    """Return the Service port that the comments of a chain of kube-proxy name."""
    comments = (rule.comment.partition(" -> ")[0] for rule in reversed(chain.rules))
    return next((comment for comment in comments if "/" in comment and " " not in comment), "")


def _targets(rule: ast.Rule) -> Iterator[str]:
    """Yield the chains that a rule may call."""
    for each in rule.expressions:
        verdicts: Iterable[object] = (each,)
        if isinstance(each, ast.RandomGoto):
            yield from each.chains
        elif isinstance(each, ast.InlineVerdictMap):
            verdicts = (verdict for _, verdict in each.arms)
        elif isinstance(each, ast.RandomMap):
            verdicts = (action for *_, action in each.arms)
        yield from (verdict.chain for verdict in verdicts if isinstance(verdict, (ast.Goto, ast.Jump)))


# ---- chains that contradict the structure ---------------------------------------------------------------------------

_OF_ANOTHER = "has a rule of another chain"
_NOT_READ = (ast.Unknown, ast.Undecoded, ast.RuleGap)


def _has(chain: ast.Chain, *kinds: type) -> bool:
    return any(_has_any(rule, *kinds) for rule in chain.rules)


def _has_any(rule: ast.Rule, *kinds: type) -> bool:
    return any(isinstance(each, kinds) for each in rule.expressions)


def _endpoint_flaw(chain: ast.Chain) -> str:
    if not _has(chain, ast.Dnat):
        return "has no rule that rewrites the destination"
    if len(set(rewrites(chain))) > 1:
        return _OF_ANOTHER
    return "" if "KUBE-MARK-MASQ" in chain.targets else "has no rule that marks what the endpoint sends to itself"


def _service_flaw(chain: ast.Chain) -> str:
    """Check the probabilities of the endpoints: 1/n, 1/(n-1), …, and the last without any (row 3.9)."""
    if _has(chain, ast.Dnat):
        return _OF_ANOTHER
    endpoints = [rule for rule in chain.rules if rule.target.startswith("KUBE-SEP-")]
    spread = [rule for rule in endpoints if not _has_any(rule, ast.RecentCheck)]
    if not spread:
        return "has no rule that sends to an endpoint"
    for left, rule in zip(range(len(spread), 0, -1), spread, strict=True):
        random = next((each for each in rule.expressions if isinstance(each, ast.RandomMatch)), None)
        probability = Fraction(random.probability) if random is not None else Fraction(1)
        if abs(probability - Fraction(1, left)) > _TOLERANCE:
            return f"has {len(spread)} endpoints, with probabilities of another number"
    if {rule.target for rule in endpoints} != {rule.target for rule in spread}:
        return "returns clients to an endpoint that it does not send to"
    return ""


def _external_flaw(chain: ast.Chain) -> str:
    if not chain.rules:
        return "has no rule"
    if _has(chain, ast.Dnat):
        return _OF_ANOTHER
    leads = any(target != "KUBE-MARK-MASQ" for target in chain.targets) or _has(chain, ast.DropPacket)
    return "" if leads else "has no rule that leads to an endpoint"


def _accepts_marked(chain: ast.Chain) -> bool:
    return any(_has_any(rule, ast.Accept) and _has_any(rule, ast.MarkIs) for rule in chain.rules) or _has(
        chain, *_NOT_READ
    )


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


def maps_of(rules: Iterable[tuple[ast.Expression, ...]]) -> set[str]:
    """Return the verdict maps that rules look up."""
    return {each.map for rule in rules for each in rule if isinstance(each, ast.VerdictMap)}


_CHECKS = ("firewall-check", "service-endpoints-check", "nodeport-endpoints-check")
"""Chains of which each rule looks up a map."""
_SPREADS = (ast.RandomGoto, ast.RandomMap, ast.VerdictMap, ast.InlineVerdictMap)


def _asks(rule: ast.Rule, name: str) -> bool:
    return any(isinstance(each, ast.InSet) and each.name == name for each in rule.expressions)


def _is_own(chain: str, rule: ast.Rule) -> bool:
    """Return True for a rule as kube-proxy writes it into this chain. Without the line between them, two chains become one."""
    if chain in _CHECKS:
        return bool(maps_of([rule.expressions]))
    if chain == CLUSTER_IPS_CHECK:
        # The second rule drops packets for the rest of the network of Services.
        return _asks(rule, CLUSTER_IPS) or _has_any(rule, ast.DropPacket)
    if chain == "services":
        return bool(maps_of([rule.expressions])) or _marks(rule)
    if chain == "masquerading":
        return not _has_any(rule, ast.RejectPacket, ast.DropPacket, ast.VerdictMap)
    return not (chain.startswith("external-") and _has_any(rule, *_SPREADS, ast.Dnat))


def _nft_flaw(chain: ast.Chain, maps: set[str]) -> str:
    if chain.name == "masquerading":
        if HAIRPINS in maps and not any(_asks(rule, HAIRPINS) for rule in chain.rules):
            return f"does not look up the set {HAIRPINS}"
        return _postrouting_flaw(chain)
    if chain.hook is not None:
        known = {jump.target for jump in NFT_JUMPS if jump.hook == chain.hook.hook}
        return "" if set(chain.targets) <= known else _OF_ANOTHER
    if any(not _is_own(chain.name, rule) for rule in chain.rules):
        return _OF_ANOTHER
    if chain.name.startswith("endpoint-") and len(set(rewrites(chain))) > 1:
        return _OF_ANOTHER
    lacks = maps & maps_of(NFT_CHAINS.get(chain.name, ())) - maps_of(rule.expressions for rule in chain.rules)
    if lacks:
        return f"does not look up the map {min(lacks)}"
    if chain.name.startswith("endpoint-") and not _has(chain, ast.Dnat):
        return "has no rule that rewrites the destination"
    if chain.name.startswith("firewall-") and "/" in chain.name and not _has(chain, ast.DropPacket):
        return "has no rule that drops what the source ranges leave out"
    if chain.name.startswith("external-") and not any("/" in target for target in chain.targets):
        return "has no rule that sends to the Service"
    if chain.name.startswith(("service-", "local-")) and not _has(chain, *_SPREADS):
        return "has no rule that sends to an endpoint"
    return ""


# ---- what is missing as a whole -------------------------------------------------------------------------------------


def absent_parts(ruleset: ast.Ruleset, family: IPFamily, lost: Mapping[str, str], has_servers: bool) -> tuple[str, str]:
    """Return why the rules may rewrite, and may refuse, a packet that no known rule does; "" where the text has them all.

    `lost` has the signs of missing lines by table (`LossSigns.lost`). `has_servers` is True if virtual servers of IPVS are
    known.
    """
    if not ruleset.copied:
        return "", ""
    held = {table.name: table for table in ruleset.tables if table.family in (None, family)}
    own = held.get(KUBE_PROXY_TABLE)
    if own is not None:
        partial = (own.partial and f"table {KUBE_PROXY_TABLE}: {own.partial}") or lost.get(KUBE_PROXY_TABLE, "")
        lacks = [f"the map {name}" for name in (SERVICE_IPS,) if name not in own.sets]
        lacks += [f"the map {name}" for name in ("no-endpoint-services", "firewall-ips") if name not in own.sets]
        return (
            partial
            or (f"{lacks[0]} of table {KUBE_PROXY_TABLE} is not in the input" if SERVICE_IPS not in own.sets else ""),
            partial or (f"{lacks[0]} of table {KUBE_PROXY_TABLE} is not in the input" if lacks else ""),
        )
    if any(name.startswith(NARTHEX) for name in held):
        return "", ""
    if not any(name in XTABLES_JUMPS for name in held):
        return ("", "") if has_servers else ("no rules of a Service proxy are in the input",) * 2
    nat, filters = (_incomplete(ruleset, held, name) or lost.get(name, "") for name in ("nat", "filter"))
    return nat, filters


def _incomplete(ruleset: ast.Ruleset, held: Mapping[str, ast.Table], name: str) -> str:
    if name not in held:
        return ruleset.absent.get(name) or f"table {name} of iptables is not in the input"
    return ruleset.absent.get(name) or (held[name].partial and f"table {name}: {held[name].partial}")
