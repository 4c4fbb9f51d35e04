"""Requests: what is refused, with which number, before anything happens."""

import json

import pytest

from narthex.cni import request
from narthex.cni.errors import CniError

GOOD = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "abc", "CNI_NETNS": "/run/netns/x", "CNI_IFNAME": "eth0"}


def config(**more):
    return json.dumps({"cniVersion": "1.1.0", "name": "net", "type": "bridge", **more}).encode()


def test_a_good_one():
    got = request.read("bridge", {**GOOD, "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=web"}, config())
    assert (got.command, got.version, got.network, got.attachment) == ("ADD", "1.1.0", "net", "net:abc:eth0")
    assert got.args == {"IgnoreUnknown": "1", "K8S_POD_NAME": "web"}


def test_no_version_is_the_first():
    assert request.read("bridge", GOOD, b'{"name":"net"}').version == "0.1.0"


@pytest.mark.parametrize(
    "environment, stdin, code, words",
    [
        ({"CNI_COMMAND": ""}, config(), 4, "CNI_COMMAND"),
        ({"CNI_COMMAND": "MOVE"}, config(), 4, "MOVE"),
        ({"CNI_CONTAINERID": "", "CNI_NETNS": ""}, config(), 4, "[CNI_CONTAINERID,CNI_NETNS] missing"),
        ({"CNI_COMMAND": "DEL", "CNI_NETNS": ""}, config(), None, ""),
        ({"CNI_COMMAND": "DEL", "CNI_IFNAME": ""}, config(), 4, "[CNI_IFNAME] missing"),
        ({"CNI_CONTAINERID": "../etc"}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "a/b"}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "-a"}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "a\x01"}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "é"}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "a" * 161}, config(), 4, "container id"),
        ({"CNI_CONTAINERID": "a" * 150}, config(name="n" * 100), 4, "too long together"),
        ({"CNI_IFNAME": "."}, config(), 4, "interface name"),
        ({"CNI_IFNAME": ".."}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a/b"}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a:b"}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a b"}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a\x7f"}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a\x01"}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "é" * 8}, config(), 4, "interface name"),
        ({"CNI_IFNAME": "a" * 16}, config(), 4, "interface name"),
        ({"CNI_ARGS": "nonsense"}, config(), 4, "CNI_ARGS"),
        ({}, b"", 6, "cannot be read"),
        ({}, b"[]", 6, "object"),
        ({}, b"{" * 100000, 6, "no key"),
        ({}, b'{"a":' * 100000, 6, "deeper than"),
        ({}, b"[" * 100000, 6, "deeper than"),
        ({}, b" " * (1 << 20) + b"{}", 6, "longer than"),
        ({}, b'{"name":"net","name":"other"}', 6, "is a duplicate"),
        ({}, b'{"name":"\xff"}', 6, "UTF-8"),
        ({}, b'{"name":"net\n"}', 6, "control character"),
        ({}, b'{"cniVersion":"1.1.0"}', 7, "network name"),
        ({}, config(name="../x"), 7, "network name"),
        ({}, config(name="a/b"), 7, "network name"),
        ({}, config(name=".hidden"), 7, "network name"),
        ({}, config(name="a\u0000"), 7, "network name"),
        ({}, config(name=5), 7, "must be a string"),
        ({}, config(cniVersion="9.9.9"), 1, "incompatible"),
        ({"CNI_COMMAND": "CHECK"}, config(cniVersion="0.3.1"), 1, "does not allow CHECK"),
        ({"CNI_COMMAND": "GC"}, config(cniVersion="1.0.0"), 1, "does not allow GC"),
        ({"CNI_COMMAND": "STATUS"}, config(cniVersion="1.0.0"), 1, "does not allow STATUS"),
    ],
)
def test_what_is_refused(environment, stdin, code, words):
    if code is None:
        assert request.read("bridge", GOOD | environment, stdin)
        return
    with pytest.raises(CniError) as caught:
        request.read("bridge", GOOD | environment, stdin)
    assert caught.value.code == code and words in caught.value.message
    assert len(caught.value.message) < 400


def test_the_error_names_both_versions():
    with pytest.raises(CniError) as caught:
        request.read("bridge", GOOD, config(cniVersion="9.9.9"))
    assert "9.9.9" in caught.value.details and "1.1.0" in caught.value.details


def test_arguments_that_nobody_knows():
    got = request.read("bridge", {**GOOD, "CNI_ARGS": "IP=10.0.0.5;ODD=1"}, config())
    with pytest.raises(CniError) as caught:
        request.check_arguments(got, ("IP",))
    assert caught.value.code == 4 and "ODD" in caught.value.message
    kind = request.read("bridge", {**GOOD, "CNI_ARGS": "ODD=1;IgnoreUnknown=true"}, config())
    request.check_arguments(kind, ("IP",))


@pytest.mark.parametrize(
    "entry",
    [{}, {"containerID": "a"}, {"containerID": "../x", "ifname": "eth0"}, {"containerID": "a", "ifname": 5}, "x"],
)
def test_gc_by_a_list_that_is_half_understood_is_refused(entry):
    asked = request.read("bridge", {"CNI_COMMAND": "GC"}, config(**{"cni.dev/valid-attachments": [entry]}))
    with pytest.raises(CniError) as caught:
        request.valid_attachments(asked)
    assert caught.value.code == 7
