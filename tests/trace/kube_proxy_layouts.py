"""The rules that kube-proxy 1.18, 1.25, 1.30, and 1.36 write for the same four Services, as data, and the prints of tools.

`saved` returns the text of iptables-save, `listed` that of nft. The other functions turn the former into what people paste:
`iptables -S`, `-L` in its forms, the output of `grep`, and nft's view of the tables of iptables-nft.
"""

from __future__ import annotations

import re

VERSIONS = ("1.18", "1.25", "1.30", "1.36")
POD, CLIENT, NODE = "10.244.1.9", "198.51.100.7", "192.168.1.11"
WEB, EMPTY, DNS, BALANCER = "10.96.0.20", "10.96.0.30", "10.96.0.10", "203.0.113.9"
NODE_PORT = 30080
_PODS = "10.244.0.0/16"
_WEB, _DNS, _LB = "AAAAAAAAAAAAAAAA", "DDDDDDDDDDDDDDDD", "LLLLLLLLLLLLLLLL"
_ENDPOINTS = (("EEEEEEEEEEEEEEE1", "10.244.1.7:8080"), ("EEEEEEEEEEEEEEE2", "10.244.2.7:8080"))
_RESOLVER = ("EEEEEEEEEEEEEEE3", "10.244.1.3:53")


def _comment(text: str) -> str:
    return f'-m comment --comment "{text}"'


def _to(address: str, protocol: str, port: int, comment: str) -> str:
    return f"-d {address}/32 -p {protocol} {_comment(comment)} -m {protocol} --dport {port}"


def nat(version: str) -> list[str]:
    """Return the lines of the nat table."""
    old = version == "1.18"
    spread = [("0.50000000000", _ENDPOINTS[0]), ("", _ENDPOINTS[1])]
    rules = [
        f"-A PREROUTING {_comment('kubernetes service portals')} -j KUBE-SERVICES",
        f"-A OUTPUT {_comment('kubernetes service portals')} -j KUBE-SERVICES",
        f"-A POSTROUTING {_comment('kubernetes postrouting rules')} -j KUBE-POSTROUTING",
        f"-A POSTROUTING -s {_PODS} -d {_PODS} -j RETURN",
        f"-A POSTROUTING -s {_PODS} ! -d 224.0.0.0/4 -j MASQUERADE --random-fully",
        "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
    ]
    requiring = _comment("kubernetes service traffic requiring SNAT")
    if old:
        rules.append(f"-A KUBE-POSTROUTING {requiring} -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully")
    else:
        rules += [
            "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
            "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
            f"-A KUBE-POSTROUTING {requiring} -j MASQUERADE --random-fully",
        ]
    marked: dict[str, str] = {}
    for address, protocol, port, chain, text in (
        (WEB, "tcp", 80, _WEB, "shop/web:http cluster IP"),
        (DNS, "udp", 53, _DNS, "kube-system/dns:dns cluster IP"),
    ):
        if old:
            rules.append(f"-A KUBE-SERVICES ! -s {_PODS} {_to(address, protocol, port, text)} -j KUBE-MARK-MASQ")
        marked[chain] = f"-A KUBE-SVC-{chain} ! -s {_PODS} {_to(address, protocol, port, text)} -j KUBE-MARK-MASQ"
        rules.append(f"-A KUBE-SERVICES {_to(address, protocol, port, text)} -j KUBE-SVC-{chain}")
    last = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
    rules.append(f"-A KUBE-SERVICES {_comment(last)} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS")
    node_port = f"-A KUBE-NODEPORTS -p tcp {_comment('shop/web:http')} -m tcp --dport {NODE_PORT}"
    if old:
        rules += [f"{node_port} -j KUBE-MARK-MASQ", f"{node_port} -j KUBE-SVC-{_WEB}"]
    else:
        rules += [
            f"{node_port} -j KUBE-EXT-{_WEB}",
            f"-A KUBE-EXT-{_WEB} {_comment('masquerade traffic for shop/web:http external destinations')} -j KUBE-MARK-MASQ",
            f"-A KUBE-EXT-{_WEB} -j KUBE-SVC-{_WEB}",
            marked[_WEB],
        ]
    for probability, (chain, endpoint) in spread:
        text = _comment("shop/web:http" if old else f"shop/web:http -> {endpoint}")
        chance = f"-m statistic --mode random --probability {probability} " if probability else ""
        rules.append(f"-A KUBE-SVC-{_WEB} {text} {chance}-j KUBE-SEP-{chain}")
    if not old:
        rules.append(marked[_DNS])
    arrow = "" if old else f" -> {_RESOLVER[1]}"
    rules.append(f"-A KUBE-SVC-{_DNS} {_comment('kube-system/dns:dns' + arrow)} -j KUBE-SEP-{_RESOLVER[0]}")
    for (chain, endpoint), protocol, text in (
        (_ENDPOINTS[0], "tcp", "shop/web:http"),
        (_ENDPOINTS[1], "tcp", "shop/web:http"),
        (_RESOLVER, "udp", "kube-system/dns:dns"),
    ):
        source = endpoint.partition(":")[0]
        rules += [
            f"-A KUBE-SEP-{chain} -s {source}/32 {_comment(text)} -j KUBE-MARK-MASQ",
            f"-A KUBE-SEP-{chain} -p {protocol} {_comment(text)} -m {protocol} -j DNAT --to-destination {endpoint}",
        ]
    return _table("nat", ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"), rules)


def filter_(version: str) -> list[str]:
    """Return the lines of the filter table."""
    new = "-m conntrack --ctstate NEW"
    portals = _comment("kubernetes service portals")
    visible = _comment("kubernetes externally-visible service portals")
    rules: list[str] = []
    if version in ("1.30", "1.36"):
        firewall = _comment("kubernetes load balancer firewall")
        rules += [f"-A {chain} {new} {firewall} -j KUBE-PROXY-FIREWALL" for chain in ("INPUT", "FORWARD", "OUTPUT")]
    if version != "1.18":
        rules.append(f"-A INPUT {_comment('kubernetes health check service ports')} -j KUBE-NODEPORTS")
    rules += [
        f"-A INPUT {new} {visible} -j KUBE-EXTERNAL-SERVICES",
        f"-A FORWARD {_comment('kubernetes forwarding rules')} -j KUBE-FORWARD",
        f"-A FORWARD {new} {portals} -j KUBE-SERVICES",
        f"-A OUTPUT {new} {portals} -j KUBE-SERVICES",
    ]
    if version != "1.18":
        rules.append(f"-A FORWARD {new} {visible} -j KUBE-EXTERNAL-SERVICES")
        rules.append(
            f"-A KUBE-EXTERNAL-SERVICES {_to(BALANCER, 'tcp', 443, 'shop/lb:https has no local endpoints')} -j DROP"
        )
    refused = _to(EMPTY, "tcp", 80, "shop/empty:http has no endpoints")
    rules += [
        "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
        f"-A KUBE-FORWARD {_comment('kubernetes forwarding rules')} -m mark --mark 0x4000/0x4000 -j ACCEPT",
        f"-A KUBE-FORWARD {_comment('kubernetes forwarding conntrack rule')} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        f"-A KUBE-SERVICES {refused} -j REJECT --reject-with icmp-port-unreachable",
    ]
    return _table("filter", ("INPUT", "FORWARD", "OUTPUT"), rules)


def _table(name: str, bases: tuple[str, ...], rules: list[str]) -> list[str]:
    chains = dict.fromkeys((*(rule.split()[1] for rule in rules), *(re.findall(r"-j (KUBE-\S+)", " ".join(rules)))))
    own = sorted(chain for chain in chains if chain not in bases)
    order = {chain: number for number, chain in enumerate((*bases, *own))}
    return [
        f"*{name}",
        *(f":{chain} ACCEPT [0:0]" for chain in bases),
        *(f":{chain} - [0:0]" for chain in own),
        *sorted(rules, key=lambda rule: order[rule.split()[1]]),
        "COMMIT",
    ]


def mangle() -> list[str]:
    """Return the lines of the mangle table."""
    bases = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
    return ["*mangle", *(f":{chain} ACCEPT [0:0]" for chain in bases), ":KUBE-PROXY-CANARY - [0:0]", "COMMIT"]


def saved(version: str, variant: str = "nf_tables", tool: str = "iptables") -> str:
    """Return the text of iptables-save."""
    head = f"# Generated by {tool}-save v1.8.9 ({variant}) on Mon Jan  6 10:00:00 2025"
    tail = "# Completed on Mon Jan  6 10:00:00 2025"
    return "".join(f"{line}\n" for table in (mangle(), filter_(version), nat(version)) for line in (head, *table, tail))


def six(text: str) -> str:
    """Return the same rules for IPv6, with the addresses of other networks."""
    pairs = (
        ("icmp-port", "icmp6-port"),
        ("10.244.0.0/16", "fd00:244::/48"),
        ("224.0.0.0/4", "ff00::/8"),
        ("/32", "/128"),
    )
    for old, new in pairs:
        text = text.replace(old, new)
    text = re.sub(r"--to-destination 10\.244\.(\d)\.(\d)", r"--to-destination [fd00:244::\1:\2]", text)
    text = re.sub(r"-> 10\.244\.(\d)\.(\d)", r"-> [fd00:244::\1:\2]", text)
    text = re.sub(r"10\.244\.(\d)\.(\d)", r"fd00:244::\1:\2", text)
    return re.sub(r"(?:10\.96|203\.0)\.\d+\.(\d+)", r"fd00:96::\1", text)


def rules_of(table: list[str]) -> str:
    """Return the text of `iptables -S`."""
    found: list[str] = []
    for line in table:
        if line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            found.append(f"-N {chain}" if policy == "-" else f"-P {chain} {policy}")
        elif line.startswith("-A"):
            found.append(line)
    return "".join(f"{line}\n" for line in found)


# ---- listings ----------------------------------------------------------------------------------------------------------

_MARKS = {"0x4000/0x4000": "MARK or 0x4000", "0x4000/0x0": "MARK xor 0x4000"}


def listing_of(table: list[str], *, verbose: bool = False, names: bool = False) -> str:
    """Return the text of `iptables -nL`, `-nvL`, or `-L`."""
    policies = dict(line[1:].split()[:2] for line in table if line.startswith(":"))
    rules = [line for line in table if line.startswith("-A")]
    calls = re.findall(r"-j (\S+)", " ".join(rules))
    blocks: list[str] = []
    for chain, policy in policies.items():
        head = (
            f"({calls.count(chain)} references)"
            if policy == "-"
            else f"(policy {policy}{' 0 packets, 0 bytes' * verbose})"
        )
        lines = [f"Chain {chain} {head}"]
        lines.append(
            " pkts bytes target     prot opt in     out     source               destination"
            if verbose
            else "target     prot opt source               destination"
        )
        own = (rule for rule in rules if rule.split()[1] == chain)
        lines += [_listed(rule, verbose=verbose, names=names) for rule in own]
        blocks.append("".join(f"{line}\n" for line in lines))
    return "\n".join(blocks)


def _listed(rule: str, *, verbose: bool, names: bool) -> str:
    def value(option: str) -> str:
        found = re.search(rf"(! )?(?<!\S){option} (\S+)", rule)
        return ("!" if found[1] else "") + found[2].removesuffix("/32") if found else ""

    anywhere = "anywhere" if names else "0.0.0.0/0"
    protocol = value("-p")
    shown = [_shown(rule, kind, protocol, names=names) for kind in re.findall(r"-m (\S+)|(-j \S+)", rule)]
    matches = " ".join(filter(None, shown))
    target = value("-j")
    columns = f"{target:<10} {protocol or 'all':<4} --  "
    if verbose:
        columns = f"    0     0 {target:<10} {protocol or 'all':<4} --  *      *       "
    return f"{columns}{value('-s') or anywhere:<20} {value('-d') or anywhere:<20} {matches}".rstrip()


def _shown(rule: str, kind: tuple[str, str], protocol: str, *, names: bool) -> str:
    match, jump = kind
    found: dict[str, str] = {}
    for option in (
        "comment",
        "dport",
        "ctstate",
        "mark",
        "probability",
        "dst-type",
        "to-destination",
        "set-xmark",
        "reject-with",
    ):
        held = re.search(rf'(! )?--{option} ("[^"]*"|\S+)', rule)
        found[option] = (("! " if held[1] else "") + held[2].strip('"')) if held else ""
    if match == "comment":
        return f"/* {found['comment']} */"
    if match in ("tcp", "udp") and found["dport"]:
        port = {"80": "http", "53": "domain", "443": "https"}.get(found["dport"], found["dport"])
        return f"{match} dpt:{port if names else found['dport']}"
    if match == "conntrack":
        return f"ctstate {found['ctstate']}"
    if match == "mark":
        return f"mark match {found['mark']}"
    if match == "statistic":
        return f"statistic mode random probability {found['probability']}"
    if match == "addrtype":
        return f"ADDRTYPE match dst-type {found['dst-type']}"
    if jump == "-j DNAT":
        return f"{protocol} to:{found['to-destination']}"
    if jump == "-j MARK":
        return _MARKS[found["set-xmark"]]
    if jump == "-j REJECT":
        return f"reject-with {found['reject-with']}"
    return "random-fully" if jump == "-j MASQUERADE" else ""


# ---- nft ---------------------------------------------------------------------------------------------------------------

_HOOKS = {
    "PREROUTING": "prerouting priority dstnat",
    "INPUT": "input priority {}",
    "FORWARD": "forward priority filter",
    "OUTPUT": "output priority {}",
    "POSTROUTING": "postrouting priority srcnat",
}


def as_nft(table: list[str], *, decoded: bool = True) -> str:
    """Return what nft prints for a table of iptables-nft; without `decoded` as an nft without the decoder of xtables does."""
    name = table[0][1:]
    lines = [f"table ip {name} {{"]
    for line in (each for each in table if each.startswith(":")):
        chain, policy = line[1:].split()[:2]
        lines.append(f"\tchain {chain} {{")
        if policy != "-":
            priority = {"nat": {"INPUT": "100", "OUTPUT": "-100"}}.get(name, {}).get(chain, "filter")
            kind = "nat" if name == "nat" else "filter"
            lines.append(f"\t\ttype {kind} hook {_HOOKS[chain].format(priority)}; policy accept;")
        own = (each for each in table if each.startswith("-A") and each.split()[1] == chain)
        lines += [f"\t\t{_nft_rule(each, decoded=decoded)}" for each in own]
        lines += ["\t}", ""]
    return "\n".join((*lines[:-1], "}", ""))


def _nft_rule(rule: str, *, decoded: bool) -> str:
    parts: list[str] = []
    for option, field in (("-p", "meta l4proto"), ("-s", "ip saddr"), ("-d", "ip daddr")):
        found = re.search(rf"(! )?(?<!\S){option} (\S+)", rule)
        if found:
            parts.append(f"{field} {'!= ' if found[1] else ''}{found[2].removesuffix('/32')}")
    if "--comment" in rule:
        parts.append("" if decoded else 'xt match "comment"')
    random = _option(rule, "probability")
    matches = {
        "conntrack": "ct state " + _option(rule, "ctstate").lower(),
        "statistic": f"meta random & 2147483647 < {int(float(random or 0) * 2**31)}",
        "addrtype": "fib daddr type local",
    }
    parts += [text if decoded else f'xt match "{match}"' for match, text in matches.items() if f"-m {match}" in rule]
    port = re.search(r"-m (tcp|udp) --dport (\d+)", rule)
    if port:
        parts.append(f"{port[1]} dport {port[2]}")
    mark = re.search(r"-m mark (! )?--mark 0x4000/0x4000", rule)
    if mark:
        parts.append(f"meta mark & 0x00004000 {'!=' if mark[1] else '=='} 0x00004000")
    parts.append("counter packets 0 bytes 0")
    target = _option(rule, "-j", dashes="")
    extensions = {
        "DNAT": f"dnat to {_option(rule, 'to-destination')}",
        "MASQUERADE": "masquerade fully-random",
        "REJECT": "reject",
        "MARK": f"meta mark set mark {'or' if rule.endswith('0x4000/0x4000') else 'xor'} 0x4000",
    }
    if target in extensions:
        parts.append(extensions[target] if decoded else f'xt target "{target}"')
    else:
        parts.append(target.lower() if target in ("RETURN", "ACCEPT", "DROP") else f"jump {target}")
    return " ".join(parts)


def _option(rule: str, name: str, dashes: str = "--") -> str:
    found = re.search(rf"{dashes}{name} (\S+)", rule)
    return found[1] if found else ""


BASE_CHAINS = """\
    chain filter-prerouting-pre-dnat {
        type filter hook prerouting priority dstnat - 10; policy accept;
        ct state new jump firewall-check
    }

    chain filter-output-pre-dnat {
        type filter hook output priority dstnat - 10; policy accept;
        ct state new jump firewall-check
    }

    chain filter-input {
        type filter hook input priority filter; policy accept;
        ct state new jump nodeport-endpoints-check
        ct state new jump service-endpoints-check
    }

    chain filter-forward {
        type filter hook forward priority filter; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }

    chain filter-output {
        type filter hook output priority filter; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }

    chain nat-prerouting {
        type nat hook prerouting priority dstnat; policy accept;
        jump services
    }

    chain nat-output {
        type nat hook output priority -100; policy accept;
        jump services
    }

    chain nat-postrouting {
        type nat hook postrouting priority srcnat; policy accept;
        jump masquerading
    }

"""
"""The chains of mode nftables that are bound to hooks."""

_NFTABLES = """table ip kube-proxy {
    comment "rules for kube-proxy"

    set cluster-ips {
        type ipv4_addr
        comment "Active ClusterIPs"
        elements = { 10.96.0.10, 10.96.0.20, 10.96.0.30, 10.96.0.40 }
    }

    set nodeport-ips {
        type ipv4_addr
        comment "IPs that accept NodePort traffic"
        elements = { 192.168.1.11 }
    }

    map firewall-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        comment "destinations that are subject to LoadBalancerSourceRanges"
    }

    map no-endpoint-services {
        type ipv4_addr . inet_proto . inet_service : verdict
        comment "vmap to drop or reject packets to services with no endpoints"
        elements = { 10.96.0.30 . tcp . 80 comment "shop/empty:http" : goto reject-chain,
            203.0.113.9 . tcp . 443 comment "shop/lb:https" : drop }
    }

    map no-endpoint-nodeports {
        type inet_proto . inet_service : verdict
        comment "vmap to drop or reject packets to service nodeports with no endpoints"
    }

    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        comment "ClusterIP, ExternalIP and LoadBalancer IP traffic"
        elements = { 10.96.0.20 . tcp . 80 : goto service-AAAAAAAA-shop/web/tcp/http,
            10.96.0.40 . tcp . 443 : goto service-LLLLLLLL-shop/lb/tcp/https,
            203.0.113.9 . tcp . 443 : goto external-LLLLLLLL-shop/lb/tcp/https,
            10.96.0.10 . udp . 53 : goto service-DDDDDDDD-kube-system/dns/udp/dns }
    }

    map service-nodeports {
        type inet_proto . inet_service : verdict
        comment "NodePort traffic"
        elements = { tcp . 30080 : goto external-AAAAAAAA-shop/web/tcp/http }
    }

"""
_NFTABLES += BASE_CHAINS
_NFTABLES += """\
    chain services {
        ip daddr . meta l4proto . th dport vmap @service-ips
        ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
    }

    chain service-endpoints-check {
        ip daddr . meta l4proto . th dport vmap @no-endpoint-services
    }

    chain nodeport-endpoints-check {
        ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
    }

    chain firewall-check {
        ip daddr . meta l4proto . th dport vmap @firewall-ips
    }

    chain cluster-ips-check {
        ip daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
    }

    chain reject-chain {
        reject
    }

    chain mark-for-masquerade {
        meta mark set meta mark | 0x00004000
    }

    chain masquerading {
        meta mark & 0x00004000 == 0x00000000 return
        meta mark set meta mark ^ 0x00004000
        masquerade fully-random
    }

    chain service-AAAAAAAA-shop/web/tcp/http {
        ip daddr 10.96.0.20 tcp dport 80 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
        numgen random mod 2 vmap { 0 : goto endpoint-EEEEEEE1-shop/web/tcp/http__10.244.1.7/8080, 1 : goto endpoint-EEEEEEE2-shop/web/tcp/http__10.244.2.7/8080 }
    }

    chain external-AAAAAAAA-shop/web/tcp/http {
        jump mark-for-masquerade
        goto service-AAAAAAAA-shop/web/tcp/http
    }

    chain endpoint-EEEEEEE1-shop/web/tcp/http__10.244.1.7/8080 {
        ip saddr 10.244.1.7 jump mark-for-masquerade
        meta l4proto tcp dnat to 10.244.1.7:8080
    }

    chain endpoint-EEEEEEE2-shop/web/tcp/http__10.244.2.7/8080 {
        ip saddr 10.244.2.7 jump mark-for-masquerade
        meta l4proto tcp dnat to 10.244.2.7:8080
    }

    chain service-LLLLLLLL-shop/lb/tcp/https {
        ip daddr 10.96.0.40 tcp dport 443 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
        numgen random mod 1 vmap { 0 : goto endpoint-EEEEEEE4-shop/lb/tcp/https__10.244.2.9/8443 }
    }

    chain external-LLLLLLLL-shop/lb/tcp/https {
        ip saddr 10.244.0.0/16 goto service-LLLLLLLL-shop/lb/tcp/https comment "short-circuit pod traffic"
        fib saddr type local jump mark-for-masquerade comment "masquerade local traffic"
        fib saddr type local goto service-LLLLLLLL-shop/lb/tcp/https comment "short-circuit local traffic"
    }

    chain endpoint-EEEEEEE4-shop/lb/tcp/https__10.244.2.9/8443 {
        ip saddr 10.244.2.9 jump mark-for-masquerade
        meta l4proto tcp dnat to 10.244.2.9:8443
    }

    chain service-DDDDDDDD-kube-system/dns/udp/dns {
        ip daddr 10.96.0.10 udp dport 53 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
        numgen random mod 1 vmap { 0 : goto endpoint-EEEEEEE3-kube-system/dns/udp/dns__10.244.1.3/53 }
    }

    chain endpoint-EEEEEEE3-kube-system/dns/udp/dns__10.244.1.3/53 {
        ip saddr 10.244.1.3 jump mark-for-masquerade
        meta l4proto udp dnat to 10.244.1.3:53
    }
}
"""
_NFTABLES = _NFTABLES.replace("    ", "\t")


def nftables() -> str:
    """Return the text of `nft list ruleset` in mode nftables, which 1.30 and 1.36 write alike for these Services."""
    return _NFTABLES


def with_handles(text: str) -> str:
    """Return what `nft -a` prints."""
    found = []
    for number, line in enumerate(text.split("\n")):
        bare = line.strip()
        plain = bare.startswith(("type ", "comment ", "elements", "}", "1", "2")) or "policy" in bare
        found.append(f"{line} # handle {number}" if bare and not plain else line)
    return "\n".join(found)
