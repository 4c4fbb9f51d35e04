"""Keys of a configuration in any case, as Go's encoding/json reads them."""

import ast
import json
from pathlib import Path

import pytest

import narthex.cni
from narthex.cni.errors import CniError
from narthex.cni.keys import MATCHED_KEYS, spelled_as_documented
from narthex.cni.plugins import host_local, portmap
from narthex.cni.program import delegate
from narthex.cni.request import read

ENVIRONMENT = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "abc", "CNI_NETNS": "/run/netns/x", "CNI_IFNAME": "eth0"}
READERS = {"text", "flag", "whole", "part", "items", "objects", "texts", "optional_ip", "directory"}
OWN = {"record", "records"}
"""Names of files that Narthex itself writes."""
AS_THEY_ARE = {"plugins"}
"""Fields of lists of plugins, which libcni does not match in any case."""


def asked(plugin, **config):
    return read(plugin, ENVIRONMENT, json.dumps({"cniVersion": "1.0.0", "name": "net", **config}).encode())


def test_port_mappings_as_containerd_writes_them():
    mapping = {"HostPort": 8088, "ContainerPort": 8080, "Protocol": "tcp", "HostIP": ""}
    (found,) = portmap.read(asked("portmap", runtimeConfig={"portMappings": [mapping]})).mappings
    assert (found.host_port, found.port, found.protocol, found.host_ip) == (8088, 8080, "tcp", b"")


def test_ranges_as_containerd_writes_them():
    ranges = [[{"Subnet": "10.1.0.0/24", "RangeStart": "10.1.0.9", "RangeEnd": "", "Gateway": ""}]]
    config = host_local.read(asked("host-local", IPAM={"Type": "host-local"}, RuntimeConfig={"IPRanges": ranges}))
    assert str(config.sets[0][0].subnet) == "10.1.0.0/24"
    assert config.sets[0][0].start == bytes((10, 1, 0, 9))


@pytest.mark.parametrize("key", ["SUBNET", "\u017fubnet", "Subnet"])
def test_keys_that_go_matches(key):
    assert spelled_as_documented([{key: {"X": 1}}]) == [{"subnet": {"X": 1}}]


@pytest.mark.parametrize("key", ["addre\u00df", "con\ufb01g", "\u0130fname"])
def test_letters_that_go_does_not_fold(key):
    assert spelled_as_documented({key: 1}) == {key: 1}


def test_the_output_of_a_delegate_is_read_in_any_case():
    printed = b'{"CNIVersion": "1.0.0", "IPs": [{"Address": "10.1.0.9/24", "GATEWAY": "10.1.0.1"}]}'
    (ip,) = delegate.result_of(printed, "other").ips
    assert str(ip.network) == "10.1.0.9/24"
    assert ip.gateway == bytes((10, 1, 0, 1))


def test_two_keys_that_differ_in_case_only():
    with pytest.raises(CniError, match="the key 'hostPort' is given twice"):
        spelled_as_documented({"runtimeConfig": {"portMappings": [{"hostPort": 1, "HostPort": 2}]}})


def test_no_two_keys_are_the_same():
    assert len({key.lower() for key in MATCHED_KEYS}) == len(MATCHED_KEYS)


def test_each_field_that_a_plugin_reads_is_matched():
    read_keys = set()
    for file in Path(narthex.cni.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, given = node.func.attr, node.args[1:2] if node.func.attr in READERS else node.args[:1]
                is_reader = name in READERS and ast.unparse(node.func.value) == "fields"
                is_reader |= name == "get" and "config" in ast.unparse(node.func.value)
                if is_reader and ast.unparse(node.args[0]) not in OWN:
                    read_keys |= {one.value for one in given if isinstance(one, ast.Constant)}
    assert sorted(read_keys - AS_THEY_ARE - {*MATCHED_KEYS}) == []
