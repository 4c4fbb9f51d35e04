"""Tables of what the API understands and makes: selectors, patches, sets of fields, protocol buffers, WebSockets, ages."""

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage

from narthex.lab.api import patches, protobuf
from narthex.lab.api.apply import apply, field_set, nested, parsed
from narthex.lab.api.columns import human_duration, json_path_values
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import KINDS, newest_first
from narthex.lab.api.reads import ListSelector
from narthex.lab.api.types import object_type
from narthex.lab.server import exec as websocket
from narthex.lab.server.websocket import MAX_MESSAGE

from .registries import registry

SERVICE = object_type(KINDS["Service"])
POD = object_type(KINDS["Pod"])


@pytest.mark.parametrize(
    ("words", "labels", "selected"),
    [
        ("a=b", {"a": "b"}, True), ("a==b", {"a": "c"}, False), ("a!=b", {}, True), ("a", {"a": ""}, True),
        ("!a", {"a": ""}, False), ("a in (b, c)", {"a": "c"}, True), ("a notin (b)", {}, True),
        ("a in (b),!c , d=e", {"a": "b", "d": "e"}, True), ("n>4", {"n": "5"}, True), ("n<4", {"n": "x"}, False),
        ("x.io/a=b", {"x.io/a": "b"}, True), ("", {}, True),
    ],
)  # fmt: skip
def test_labels_select(words, labels, selected):
    assert ListSelector(words, "", frozenset()).selects({"metadata": {"labels": labels}}) is selected


@pytest.mark.parametrize("words", ["a in (b", "a=b c=d", "a in", "n>x", "=b", "a,,b(", ")"])
def test_what_is_no_selector_is_refused(words):
    with pytest.raises(StatusError, match="unable to parse requirement"):
        ListSelector(words, "", frozenset())


def test_strategic_merge():
    held = {"spec": {"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "b"}], "externalIPs": ["1.1.1.1"]}}

    def merged(patch):
        return patches.apply(patches.STRATEGIC, held, {"spec": patch}, SERVICE)["spec"]

    assert merged({"ports": [{"port": 81, "name": "c"}]})["ports"] == [
        {"port": 80, "name": "a"},
        {"port": 81, "name": "c"},
    ]
    assert merged({"ports": [{"port": 80, "$patch": "delete"}]})["ports"] == [{"port": 81, "name": "b"}]
    assert merged({"externalIPs": ["2.2.2.2"]})["externalIPs"] == ["2.2.2.2"]
    order = [{"port": 82}, {"port": 81}, {"port": 80}]
    ordered = merged({"$setElementOrder/ports": order, "ports": [{"port": 82}]})["ports"]
    assert [each["port"] for each in ordered] == [82, 81, 80]
    assert merged({"$patch": "replace", "type": "x"}) == {"type": "x"}
    with pytest.raises(patches.BadPatch, match="does not contain declared merge key: port"):
        merged({"ports": [{"name": "a"}]})


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ({"op": "add", "path": "/l/-", "value": 3}, {"l": [1, 2, 3], "a/b": 1}),
        ({"op": "add", "path": "/l/0", "value": 3}, {"l": [3, 1, 2], "a/b": 1}),
        ({"op": "remove", "path": "/a~1b"}, {"l": [1, 2]}),
        ({"op": "move", "from": "/a~1b", "path": "/c"}, {"l": [1, 2], "c": 1}),
        ({"op": "copy", "from": "/l/1", "path": "/c"}, {"l": [1, 2], "a/b": 1, "c": 2}),
        ({"op": "test", "path": "/l/1", "value": 2}, {"l": [1, 2], "a/b": 1}),
        ({"op": "test", "path": "/l/1", "value": 3}, None),
        ({"op": "replace", "path": "/none", "value": 3}, None),
        ({"op": "remove", "path": "/l/7"}, None),
        ({"op": "remove", "path": "/l/-"}, None),
        ({"op": "nothing", "path": "/l"}, None),
    ],
)
def test_json_patch(step, after):
    held = {"l": [1, 2], "a/b": 1}
    if after is None:
        with pytest.raises(patches.BadPatch):
            patches.apply(patches.JSON_PATCH, held, [step])
    else:
        assert patches.apply(patches.JSON_PATCH, held, [step]) == after
    assert held == {"l": [1, 2], "a/b": 1}


def test_sets_of_fields_read_back():
    ports = [{"containerPort": 80}]
    raw = {
        "metadata": {"labels": {"a": "b"}, "finalizers": ["x"]},
        "spec": {"containers": [{"name": "c", "ports": ports}]},
    }
    fields = field_set(raw, POD)
    written = nested(fields)
    assert parsed(written) == fields
    container = written["f:spec"]["f:containers"]['k:{"name":"c"}']
    assert container == {
        ".": {}, "f:name": {}, "f:ports": {'k:{"containerPort":80,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
    }  # fmt: skip
    assert written["f:metadata"] == {"f:labels": {"f:a": {}}, "f:finalizers": {'v:"x"': {}}}


def test_what_is_not_applied_any_more_goes_unless_others_want_it():
    held = registry()
    kind, meta = KINDS["ConfigMap"], {"name": "a", "namespace": "shop"}

    def applied(manager, data, **how):
        return apply(held, kind, {"metadata": dict(meta), "data": data}, manager=manager, **how)[0]["data"]

    assert applied("one", {"x": "1", "y": "1"}) == {"x": "1", "y": "1"}
    assert applied("two", {"y": "1", "z": "2"}) == {"x": "1", "y": "1", "z": "2"}
    version = held.version
    applied("two", {"y": "1", "z": "2"})
    assert held.version == version
    assert applied("one", {}) == {"y": "1", "z": "2"}
    with pytest.raises(StatusError, match=r'Apply failed with 1 conflict: conflict with "two": \.data\.z'):
        applied("one", {"z": "3"})
    assert applied("one", {"z": "3"}, force=True)["z"] == "3"
    assert applied("two", {"y": "1"})["z"] == "3"


def test_protocol_buffers_of_kubectl_create():
    def part(number, data):
        return bytes((number << 3 | 2, len(data))) + data

    kind = part(1, part(1, b"v1") + part(2, b"ConfigMap"))
    raw = part(1, part(1, b"a") + bytes((7 << 3, 0))) + part(2, part(1, b"k") + part(2, b"v"))
    assert protobuf.decode(protobuf.MAGIC + kind + part(2, raw)) == {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "v"},
    }  # fmt: skip
    with pytest.raises(StatusError, match="field 9 of ConfigMap is not read"):
        protobuf.decode(protobuf.MAGIC + kind + part(2, part(9, b"x")))
    for cut in range(1, 12):
        with pytest.raises(StatusError):
            protobuf.decode(protobuf.MAGIC + (kind + part(2, raw))[:cut])


HANDSHAKE = {
    "host": "lab", "upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-protocol": "v4.channel.k8s.io, v5.channel.k8s.io",
}  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65535, 65536])
def test_websocket_messages_arrive_in_any_pieces(length):
    payload = (bytes(range(256)) * (length // 256 + 1))[:length]
    server = websocket.ChannelSocket(HANDSHAKE)
    assert b"v5.channel.k8s.io" in server.accept()
    sent = Connection(ConnectionType.CLIENT).send(BytesMessage(b"\0" + payload))
    pieces = [sent[at : at + 1000] for at in range(0, len(sent), 1000)]
    assert [each for piece in pieces for each in server.feed(piece)] == [(websocket.STDIN, payload)]
    with pytest.raises(websocket.BadFrame, match="mask"):
        list(server.feed(server.message(1, b"x")))


def test_websockets_that_are_refused():
    for change in ({"sec-websocket-protocol": "x"}, {"upgrade": "SPDY/3.1"}, {"sec-websocket-key": ""}):
        with pytest.raises(websocket.BadFrame):
            websocket.ChannelSocket(HANDSHAKE | change)
    server = websocket.ChannelSocket(HANDSHAKE)
    server.accept()
    with pytest.raises(websocket.BadFrame, match="a message has at most"):
        list(server.feed(Connection(ConnectionType.CLIENT).send(BytesMessage(b"\0" * (MAX_MESSAGE + 1)))))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (125, "2m5s"), (600, "10m"), (3 * 3600, "3h"), (3.5 * 3600, "3h30m"),
     (47 * 3600, "47h"), (3 * 86400, "3d"), (3 * 86400 + 3600, "3d1h"), (400 * 86400, "400d"), (800 * 86400, "2y70d")],
)  # fmt: skip
def test_ages(seconds, text):
    assert human_duration(seconds) == text


def test_versions_and_paths_of_custom_kinds():
    assert newest_first(["v1alpha1", "v2", "v1", "v1beta2", "x"]) == ["v2", "v1", "v1beta2", "v1alpha1", "x"]
    raw = {"spec": {"l": [{"type": "A", "s": 1}, {"type": "B", "s": 2}], "a.b": 3}}
    assert json_path_values(raw, '.spec.l[?(@.type=="B")].s') == [2]
    assert json_path_values(raw, ".spec.l[*].s") == [1, 2]
    assert json_path_values(raw, r".spec.a\.b") == [3]
    assert json_path_values(raw, ".spec.l[9].s") == json_path_values(raw, "nonsense(") == []
