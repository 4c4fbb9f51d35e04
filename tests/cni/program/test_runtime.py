"""A container runtime's half: programs that note how they are called, one after the other and back."""

import json
import sys

import pytest

from narthex.cni.errors import CniError
from narthex.cni.program.runtime import Runtime, RuntimeConf, read_network

PLUGIN = """#!{python} -IS
import json, os, sys
name = sys.argv[0].rpartition("/")[2]
config = json.load(sys.stdin)
command = os.environ["CNI_COMMAND"]
told = {{key: value for key, value in os.environ.items() if key.startswith("CNI_")}}
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([name, command, config, told]) + "\\n")
if os.path.exists({calls!r} + "." + name + "." + command):
    print(json.dumps({{"cniVersion": "1.0.0", "code": 42, "msg": name + " cannot " + command}}))
    sys.exit(1)
if command == "ADD":
    ips = config.get("prevResult", {{}}).get("ips", []) + [{{"address": "10.0.0." + str(len(name)) + "/24"}}]
    print(json.dumps({{"cniVersion": "1.0.0", "ips": ips}}))
"""
LIST = {
    "cniVersion": "1.0.0",
    "name": "net",
    "plugins": [
        {"type": "first", "mtu": 1400},
        {"type": "second", "capabilities": {"portMappings": True, "mac": False}},
    ],
}
POD = RuntimeConf(
    id="shop.web",
    namespace="/run/netns/x",
    args={"IgnoreUnknown": "1", "K8S_POD_NAME": "web"},
    capabilities={
        "portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "tcp"}],
        "mac": "02:00:00:00:00:01",
    },
)


class Place:
    """Two plugins, and what they were asked."""

    def __init__(self, path):
        self.path = path
        (path / "bin").mkdir()
        self.log = path / "calls"
        for name in ("first", "second"):
            program = path / "bin" / name
            program.write_text(PLUGIN.format(python=sys.executable, calls=str(self.log)))
            program.chmod(0o755)
        self.runtime = Runtime([path / "elsewhere", path / "bin"], path / "kept")
        self.network = read_network(json.dumps(LIST).encode())

    def break_(self, plugin, command):
        (self.path / f"calls.{plugin}.{command}").touch()

    def mend(self):
        for path in self.path.glob("calls.*"):
            path.unlink()

    def calls(self):
        """What has been called since the last look."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found

    def kept(self):
        return list((self.path / "kept").iterdir())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def order(calls):
    return [(name, command) for name, command, _, _ in calls]


def test_results_go_on_and_capabilities_to_who_has_them(place):
    made = place.runtime.add(place.network, POD)
    assert [str(ip.network) for ip in made.ips] == ["10.0.0.5/24", "10.0.0.6/24"]
    first, second = place.calls()
    assert first[:3] == ["first", "ADD", {"type": "first", "mtu": 1400, "name": "net", "cniVersion": "1.0.0"}]
    assert second[2]["prevResult"]["ips"] == [{"address": "10.0.0.5/24"}]
    # Only what the plugin can and the container wants.
    assert second[2]["runtimeConfig"] == {"portMappings": POD.capabilities["portMappings"]}
    assert second[3] == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "shop.web",
        "CNI_NETNS": "/run/netns/x",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=web",
        "CNI_PATH": f"{place.path}/elsewhere:{place.path}/bin",
    }


def test_it_is_taken_off_the_other_way_round_by_what_was_in_force(place):
    place.runtime.add(place.network, POD)
    place.calls()
    # Another process, which knows the name alone.
    Runtime([place.path / "bin"], place.path / "kept").delete("net", POD)
    calls = place.calls()
    assert order(calls) == [("second", "DEL"), ("first", "DEL")]
    for _, _, config, _ in calls:
        assert [ip["address"] for ip in config["prevResult"]["ips"]] == ["10.0.0.5/24", "10.0.0.6/24"]
    assert calls[1][2]["mtu"] == 1400
    assert place.kept() == []
    place.runtime.delete("net", POD)
    assert place.calls() == []


def test_a_failed_add_is_taken_back(place):
    place.break_("second", "ADD")
    with pytest.raises(CniError, match="second cannot ADD") as caught:
        place.runtime.add(place.network, POD)
    assert caught.value.code == 42
    assert order(place.calls()) == [("first", "ADD"), ("second", "ADD"), ("second", "DEL"), ("first", "DEL")]
    assert place.kept() == []


def test_every_plugin_is_asked_to_clear_up_and_those_that_refuse_are_asked_again(place):
    place.runtime.add(place.network, POD)
    place.calls()
    place.break_("second", "DEL")
    with pytest.raises(CniError, match="second cannot DEL"):
        place.runtime.delete("net", POD)
    assert order(place.calls()) == [("second", "DEL"), ("first", "DEL")]
    place.mend()
    place.runtime.delete("net", POD)
    assert order(place.calls()) == [("second", "DEL"), ("first", "DEL")]
    assert place.kept() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "../x"}, "no container's names"),
        ({"interface": "eth0/../x"}, "no container's names"),
        ({"args": {"A": "b;C=d"}}, "no ';' and no '='"),
    ],
)
def test_names_that_would_be_something_else(place, change, said):
    fields = {"id": POD.id, "namespace": POD.namespace, **change}
    with pytest.raises(CniError, match=said):
        place.runtime.add(place.network, RuntimeConf(**fields))
    assert place.calls() == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "must be an object"),
        ({**LIST, "name": "a/b"}, "not a network's name"),
        ({**LIST, "plugins": []}, "one plugin or more"),
        ({**LIST, "plugins": [{}]}, r"plugins\[0\].type: must name a plugin"),
        ({**LIST, "plugins": ["bridge"]}, r"plugins\[0\]: must be an object"),
    ],
)
def test_lists_that_cannot_be(config, said):
    with pytest.raises(CniError, match=said):
        read_network((config if isinstance(config, str) else json.dumps(config)).encode())


def test_a_plugin_that_is_not_there(place):
    (place.path / "bin" / "second").unlink()
    with pytest.raises(CniError, match="failed to find plugin 'second'"):
        place.runtime.add(place.network, POD)
    assert order(place.calls()) == [("first", "ADD"), ("first", "DEL")]
