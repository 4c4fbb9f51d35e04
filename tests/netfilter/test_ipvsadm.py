"""Virtual servers as ipvsadm prints them."""

import pytest

from narthex.model.net import Protocol
from narthex.netfilter.ast import Unprintable
from narthex.netfilter.ipvs import IpvsadmTextError, RealServer, VirtualServer, ipvsadm_save_text, parse_ipvsadm

WEB = VirtualServer(
    address="10.110.0.5",
    protocol=Protocol.TCP,
    port=80,
    scheduler="rr",
    reals=(RealServer("10.64.1.10", 8080), RealServer("10.64.2.10", 8080, 0)),
)
STICKY = VirtualServer(
    address="fd6e::5",
    protocol=Protocol.UDP,
    port=53,
    scheduler="mh",
    persistence_seconds=600,
    hash_ports=True,
    reals=(RealServer("fd64::a", 53, 3),),
)
EMPTY = VirtualServer(address="10.110.0.6", protocol=Protocol.SCTP, port=132, scheduler="wlc")


def test_what_is_printed_is_read_back():
    servers = {each.key: each for each in (WEB, STICKY, EMPTY)}
    assert parse_ipvsadm(ipvsadm_save_text(servers.values())).servers == servers


def test_the_words():
    assert ipvsadm_save_text([STICKY, WEB, EMPTY]) == (
        "-A -t 10.110.0.5:80 -s rr\n"
        "-a -t 10.110.0.5:80 -r 10.64.1.10:8080 -m -w 1\n"
        "-a -t 10.110.0.5:80 -r 10.64.2.10:8080 -m -w 0\n"
        "-A --sctp-service 10.110.0.6:132 -s wlc\n"
        "-A -u [fd6e::5]:53 -s mh -p 600 -b mh-port\n"
        "-a -u [fd6e::5]:53 -r [fd64::a]:53 -m -w 3\n"
    )


def test_other_peoples_virtual_servers():
    dump = parse_ipvsadm(
        "-A -t 192.0.2.1:0 -s sh -p 360 -M 255.255.255.0\n"
        "-a -t 192.0.2.1:0 -r 192.0.2.7:0 -g -w 100\n"
        "-A -f 7 -s wrr\n"
        "-a -f 7 -r 192.0.2.8:0 -i -w 1\n"
        "-A -t 192.0.2.2:443 -s sh -b sh-fallback,sh-port\n"
    )
    (any_port, real) = dump.servers["192.0.2.1", Protocol.TCP, 0], RealServer("192.0.2.7", 0, 100, "gateway")
    assert any_port.reals == (real,) and any_port.persistence_seconds == 360
    assert dump.marks == {7}
    assert dump.servers["192.0.2.2", Protocol.TCP, 443].hash_ports


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-a -t 10.0.0.1:80 -r 10.0.0.2:80 -m", "line 1: '-a -t 10.0.0.1:80 -r 10.0.0.2:80 -m': the virtual server"),
        ("\n-A -t web:http -s rr", "line 2: '-A -t web:http -s rr'"),
        ("-A -x 10.0.0.1:80 -s rr", "-x does not name the protocol"),
        ("-D -t 10.0.0.1:80", "neither -A nor -a"),
        ("-A -t", "line 1"),
        ("IP Virtual Server version 1.2.1 (size=4096)", "neither -A nor -a"),
    ],
)
def test_errors_name_the_line(text, why):
    with pytest.raises(IpvsadmTextError) as caught:
        parse_ipvsadm(text)
    assert why in str(caught.value)


@pytest.mark.parametrize("scheduler", ["rr -p 5", "", "r\nr"])
def test_no_scheduler_becomes_syntax(scheduler):
    with pytest.raises(Unprintable):
        ipvsadm_save_text([VirtualServer(address="10.0.0.1", protocol=Protocol.TCP, port=80, scheduler=scheduler)])
