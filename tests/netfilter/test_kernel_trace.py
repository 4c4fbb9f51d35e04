"""Texts that kernels' tools printed: nft 1.0.6 and xtables-monitor 1.8.9 on Linux 6.18, and a log of iptables-legacy."""

import string

from hypothesis import given
from hypothesis import strategies as st

from narthex.netfilter.dump.kernel_trace import TraceEvent, parse, probe_traces

NFT = """\
trace id 9e34ee00 ip narthex-probe comes-in packet: iif "na" ether saddr fe:6a:df:cb:89:e8 ether daddr 8a:d0:03:9f:bd:e8 ip saddr 10.1.0.2 ip daddr 10.96.0.1 ip dscp 0x00 ip ecn 0x0 ip ttl 64 ip id 56399 ip length 60 tcp sport 48796 tcp dport 80 tcp flags == 0x2 tcp window 64240 
trace id 9e34ee00 ip narthex-probe comes-in rule ip saddr 10.1.0.2 tcp dport 80 meta nftrace set 1 # handle 2 (verdict continue)
trace id 9e34ee00 ip narthex-probe comes-in policy accept 
trace id 9e34ee00 ip nat PREROUTING packet: iif "na" ether saddr fe:6a:df:cb:89:e8 ether daddr 8a:d0:03:9f:bd:e8 ip saddr 10.1.0.2 ip daddr 10.96.0.1 ip ttl 64 tcp sport 48796 tcp dport 80 tcp flags == 0x2 
trace id 9e34ee00 ip nat PREROUTING rule counter packets 0 bytes 0 jump KUBE-X # handle 7 (verdict jump KUBE-X)
trace id 9e34ee00 ip nat KUBE-X verdict return 
trace id 2ff03351 ip other pre policy accept 
trace id 9e34ee00 ip nat PREROUTING policy accept 
trace id 9e34ee00 ip s pick rule meta l4proto 6 counter packets 0 bytes 0 dnat to 10.2.0.2:8080 comment "x (verdict drop)" # handle 9 (verdict accept)
trace id 9e34ee00 ip s forw packet: iif "na" oif "nb" ip saddr 10.1.0.2 ip daddr 10.2.0.2 tcp sport 48796 tcp dport 8080 
trace id 9e34ee00 ip s forw rule ct state 0x8 meta mark set meta mark | 0x00004000 (verdict continue)
trace id 9e34ee00 ip s forw policy drop meta mark 0x00004000 
"""

XTABLES = """\
PACKET: 2 9e34ee00 IN=na OUT=nb MACSRC=fe:6a:df:cb:89:e8 MACDST=8a:d0:3:9f:bd:e8 MACPROTO=0800 SRC=10.1.0.2 DST=10.2.0.2 LEN=60 TOS=0x0 TTL=63 ID=56399 DF SPORT=48796 DPORT=8080 SYN
 TRACE: 2 9e34ee00 filter:FORWARD:rule:0x2:ACCEPT  -4 -t filter -A FORWARD -s 10.1.0.0/24 -m comment --comment "hello world" -j ACCEPT
 TRACE: 2 9e34ee00 s:natpre:rule:0x7:GOTO:pick  -4 -t s -A natpre
 TRACE: 2 9e34ee00 raw:PREROUTING:policy:ACCEPT
"""

LEGACY = """\
[ 12.5] TRACE: raw:PREROUTING:policy:2 IN=eth0 OUT= MAC=aa SRC=10.0.0.1 DST=10.0.0.2 LEN=60 TOS=0x00 TTL=64 ID=7 DF PROTO=TCP SPT=5 DPT=80 SYN
[ 12.5] TRACE: nat:PREROUTING:rule:1 IN=eth0 OUT= MAC=aa SRC=10.0.0.1 DST=10.0.0.2 LEN=60 TOS=0x00 TTL=64 ID=7 DF PROTO=TCP SPT=5 DPT=80 SYN MARK=0x4000
"""


def test_nft() -> None:
    first, second = parse(NFT.splitlines())
    assert (first.number, second.number) == ("9e34ee00", "2ff03351")
    assert [(step.table, step.chain, step.event, step.verdict) for step in first.steps] == [
        ("narthex-probe", "comes-in", TraceEvent.RULE, "continue"),
        ("narthex-probe", "comes-in", TraceEvent.POLICY, "accept"),
        ("nat", "PREROUTING", TraceEvent.RULE, "jump KUBE-X"),
        ("nat", "KUBE-X", TraceEvent.RETURN, "return"),
        ("nat", "PREROUTING", TraceEvent.POLICY, "accept"),
        ("s", "pick", TraceEvent.RULE, "accept"),
        ("s", "forw", TraceEvent.RULE, "continue"),
        ("s", "forw", TraceEvent.POLICY, "drop"),
    ]
    assert first.steps[-1].mark == 0x4000
    assert first.steps[5].handle == 9
    assert first.steps[5].rule.endswith('comment "x (verdict drop)"')
    last = first.visits[-1].packet
    assert (last.iif, last.oif, last.source, last.destination) == ("na", "nb", "10.1.0.2", "10.2.0.2")
    assert (last.source_port, last.port) == (48796, 8080)


def test_the_probes_own_table_is_no_part_of_the_answer() -> None:
    (ours,) = probe_traces(parse(NFT.splitlines()), "narthex-probe")
    assert ours.probe_chain == "comes-in"
    assert {step.table for step in ours.steps} == {"nat", "s"}


def test_xtables_monitor() -> None:
    (trace,) = parse(XTABLES.splitlines())
    assert [(step.table, step.chain, step.verdict, step.handle) for step in trace.steps] == [
        ("filter", "FORWARD", "accept", 2),
        ("s", "natpre", "goto pick", 7),
        ("raw", "PREROUTING", "accept", 0),
    ]
    assert trace.visits[0].packet.destination == "10.2.0.2"


def test_the_log_of_iptables_legacy() -> None:
    (trace,) = parse(LEGACY.splitlines())
    assert [(step.table, step.chain, step.event, step.handle, step.mark) for step in trace.steps] == [
        ("raw", "PREROUTING", TraceEvent.POLICY, 2, 0),
        ("nat", "PREROUTING", TraceEvent.RULE, 1, 0x4000),
    ]
    assert trace.visits[0].packet.port == 80


@given(st.lists(st.text(alphabet=string.printable, max_size=80), max_size=8))
def test_whatever_stands_there_is_read_or_passed_over(lines: list[str]) -> None:
    parse([*lines, *(f"trace id 12ab ip {line}" for line in lines), *(f" TRACE: {line}" for line in lines)])
