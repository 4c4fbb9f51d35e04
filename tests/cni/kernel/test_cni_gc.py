"""`narthex cni gc` removes what no attachment needs, and nothing else."""

import pytest
from tests.cni.kernel.cni_place import NODE4, OUTSIDE4, Place

from narthex.linux.run import run

pytestmark = pytest.mark.kernel
NOTHING = {"attachments": [], "elements": [], "reservations": [], "files": []}


@pytest.fixture
def place(tmp_path):
    with Place(tmp_path) as made:
        yield made


def without_address(place, name):
    """Lose the only copy of what describes an attachment's elements."""
    (place.state / "masquerade" / f"net:{name}:eth0").unlink()


def test_what_killed_runtimes_leave_is_removed(place):
    for index, name in enumerate("abc"):
        place.add(name, (8080 + index, 80, "tcp"))
    place.drop_pod("a")
    without_address(place, "b")
    # The record of c describes another element than this one.
    element = '10.77.0.99 comment "net:c:eth0"'
    run(["nft", "add", "element", "inet", "narthex-masquerade", "pods4", f"{{ {element} }}"], namespace=place.name)
    for path in (place.state / "pods" / ".net:d:eth0", place.networks / "net" / ".unfinished"):
        path.write_text("")
    before = place.records(), place.reserved(), place.owners()
    for options in (["--dry-run"], []):
        found = place.gc(*options)
        assert found["removed"] is not bool(options)
        assert found["attachments"] == ["net:a:eth0"] and found["kept"] == 2
        assert found["reservations"] == ["net 10.77.0.2", "net fd77::2"]
        assert len(found["files"]) == 2 and "narthex-masquerade pods4 0a4d0063 net:c:eth0" in found["elements"]
        assert [line for line in found["elements"] if "net:b" in line] == [
            "narthex-masquerade pods4 0a4d0003 net:b:eth0",
            "narthex-masquerade pods6 fd770000000000000000000000000003 net:b:eth0",
        ]
        if options:
            assert (place.records(), place.reserved(), place.owners()) == before
    assert place.gc().items() >= NOTHING.items()
    assert place.owners() == ["net:b:eth0", "net:c:eth0"] and place.reserved() == [
        "10.77.0.3",
        "10.77.0.4",
        "fd77::3",
        "fd77::4",
    ]
    place.serve("c", 80)
    assert place.ask(place.outside, NODE4, 8082) == f"c {OUTSIDE4}"


def test_gc_of_a_runtime_removes_elements_without_a_record(place):
    result = place.add("a", (8080, 80, "tcp"))
    place.add("b")
    without_address(place, "a")
    (place.state / "ports" / "net:a:eth0").unlink()
    (place.state / "ports" / ".net:a:eth0").write_text("")
    valid = {"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}]}
    for config in (place.portmap(result, (8080, 80, "tcp"), **valid), place.bridge(**valid)):
        place.good("GC", config, "b")
    assert place.owners() == ["net:b:eth0"]
    assert {record.partition("/")[2] for record in place.records()} == {"net:b:eth0"}
    place.good("DEL", place.bridge(), "b")
    place.nothing_left()
    # The subnets, which pods share, are left by the last DEL.
    assert [line.split()[1] for line in place.gc()["elements"]] == ["near4", "near6"]
    assert place.gc().items() >= NOTHING.items()
