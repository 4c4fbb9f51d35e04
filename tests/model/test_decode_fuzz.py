"""Whatever comes in, decoding answers with objects and problems and never with an exception."""

import copy

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.model.bases import CIDR, DEPLOYMENT, NODE, POD, SERVICE, SLICE

from narthex.model.decode.objects import Loaded, decode, decode_json, load
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN

BASES = [SERVICE, SLICE, NODE, CIDR, POD, DEPLOYMENT]
TEXT = b"\n---\n".join(yaml.safe_dump(base).encode() for base in BASES)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 70000),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["None", "10.0.0.1", "::1", "fd00::/64", "TCP", "IPv6", "ClientIP", "Local", "ExternalName", "a" * 300]
    ),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def places(value, path=()):
    """All paths into a value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


@st.composite
def mutated(draw):
    raw = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted((path for path in places(raw) if path), key=repr)))
        inside = raw
        for step in path[:-1]:
            inside = inside[step]
        if draw(st.booleans()) and isinstance(inside, dict):
            del inside[path[-1]]
        else:
            inside[path[-1]] = draw(anything)
        if not raw:
            break
    return raw


def check(loaded: Loaded) -> None:
    for item in loaded.objects:
        assert DNS_SUBDOMAIN.holds(item.name)
        assert item.namespace == "" or DNS_LABEL.holds(item.namespace)
    for problem in loaded.problems:
        assert "\n" not in str(problem) and "\x1b" not in str(problem)


@given(mutated())
def test_mutated_objects(raw):
    decoded = decode(raw, "a.yaml:1")
    assert decoded.object is not None or decoded.problems
    failed = any(problem.severity == "error" for problem in decoded.problems)
    assert not (failed and decoded.object is not None)
    check(Loaded((decoded.object,) if decoded.object else (), decoded.problems))


@given(mutated())
def test_json_and_plain_values_say_the_same(raw):
    try:
        text = msgspec.json.encode(raw)
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError):
        return
    again = msgspec.json.decode(text)
    assert decode_json(text, "a:1") == decode(again, "a:1")


@given(st.binary(max_size=200))
def test_random_bytes(data):
    check(load(data, "a.yaml"))
    decode_json(data, "a")
    decode_json(data, "a", "Service")


@given(st.text(alphabet="abAB:-?{}[]&*!|>'\"%#@`, \n\t01.~<=/", max_size=80))
def test_random_yaml(text):
    check(load(text.encode(), "a.yaml"))


@given(st.integers(0, len(TEXT)), st.binary(max_size=6), st.integers(0, 40))
def test_torn_files(at, inserted, dropped):
    check(load(TEXT[:at] + inserted + TEXT[at + dropped :], "a.yaml"))


@given(st.integers(0, len(TEXT)))
def test_half_written_files_keep_whole_documents(at):
    loaded = load(TEXT[:at], "a.yaml")
    check(loaded)
    whole = TEXT[:at].count(b"\n---\n")
    assert len(loaded.objects) >= whole


@given(anything)
def test_any_value(value):
    assert decode(value, "a:1").problems
