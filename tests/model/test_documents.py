"""YAML and JSON text to plain values with lines."""

import pytest

from narthex.model.documents import MAX_DEPTH, Document, MalformedDocument, read_documents


def values(text: str) -> list:
    return [item.value if isinstance(item, Document) else item for item in read_documents(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1", [{"a": 1}]),
        ("a: 1\n---\nb: 2\n", [{"a": 1}, {"b": 2}]),
        ("---\n---\n# nothing\n---\na: 1\n...\n", [{"a": 1}]),
        ("%YAML 1.1\n---\na: 1\n", [{"a": 1}]),
        ("\na: |\n  ---\n  text\n", [{"a": "---\ntext\n"}]),
        ("a:\r\n- b\r\n---\r\nc: d\r\n", [{"a": ["b"]}, {"c": "d"}]),
        ('{"a": 1}\n{"b": [true, null, 1.5]}', [{"a": 1}, {"b": [True, None, 1.5]}]),
        ('{\n\t"a": 1\n}', [{"a": 1}]),
        ("{a: b, c: [d]}", [{"a": "b", "c": ["d"]}]),
        ("{a: b}\n---\n{c: d}", [{"a": "b"}, {"c": "d"}]),
        ("base: &b {x: 1, y: 2}\nmade: {<<: *b, y: 3}", [{"base": {"x": 1, "y": 2}, "made": {"x": 1, "y": 3}}]),
        ("made:\n  <<: [{x: 1}, {x: 2, z: 3}]", [{"made": {"x": 1, "z": 3}}]),
        ("a: &x [1]\nb: *x", [{"a": [1], "b": [1]}]),
        ("80: a\ntrue: b", [{"80": "a", "true": "b"}]),
    ],
)
def test_documents(text, expected):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("80", 80),
        ("-1", -1),
        ("010", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("1_000", 1000),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        ("0x_", "0x_"),
        ("09", 9.0),
        ("30:80", "30:80"),
        ("2020-01-01T00:00:00Z", "2020-01-01T00:00:00Z"),
        ("10.0.0.1", "10.0.0.1"),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("'80'", "80"),
        ("!!str 80", "80"),
        ("! 80", "80"),
        ("!!int '80'", 80),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_mean_what_they_mean_to_kubernetes(scalar, value):
    assert values(f"a: {scalar}") == [{"a": value}]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\na: 2", 2, "the key 'a' is given twice, first in line 1"),
        ('{"a": 1,\n"a": 2}', 2, "the key 'a' is given twice, first in line 1"),
        ("a: b\nc: [", 2, "not valid YAML: while parsing a flow node"),
        ("a: b\n  c: d", 2, "not valid YAML: mapping values are not allowed"),
        ("a:\n\t- b", 2, "cannot start any token"),
        ("a: *b", 1, "the alias *b has no anchor"),
        ("a: &a\n- *a", 2, "the alias *a refers to itself"),
        ("? [a]\n: b", 1, "a key must be text"),
        ("x: &x a\n*x : b", 2, "a key must be text"),
        ("a: .nan", 1, ".nan is no JSON number"),
        ("a: !!python/object/apply:os.system [id]", 1, "is not allowed"),
        ("a: !custom b", 1, "the tag '!custom' is not allowed"),
        ("<<: 1", 1, "'<<' merges mappings only"),
        ("a: 1\nb: c\x07", 2, "control characters are not allowed"),
        ('{"a": 1,\n "b": 2', 2, "not valid JSON: Expecting ',' delimiter"),
        ("[" * 5000, 1, f"nested more than {MAX_DEPTH} levels deep"),
        ("- " * 5000 + "a", 1, f"nested more than {MAX_DEPTH} levels deep"),
        ("[" * 5000 + "]" * 5000, 1, f"nested more than {MAX_DEPTH} levels deep"),
        ("[" * 200 + "]" * 200, 1, f"nested more than {MAX_DEPTH} levels deep"),
        ("{a: " * 300, 1, f"nested more than {MAX_DEPTH} levels deep"),
    ],
)
def test_faults_name_the_line(text, line, said):
    (fault,) = values(text)
    assert isinstance(fault, MalformedDocument)
    assert (fault.line, said in fault.message) == (line, True), fault


def test_aliases_cannot_grow_a_document():
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
    (fault,) = values("a0: &a0 [x]\n" + levels)
    assert "aliases repeat more than" in fault.message


def test_merges_cannot_grow_a_document():
    wide = "a0: &a {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}\n"
    (fault,) = values(wide + "".join(f"b{n}: {{<<: *a}}\n" for n in range(100)))
    assert "aliases repeat more than" in fault.message


def test_one_bad_document_spares_the_others():
    found = values("a: 1\n---\nb: [\n---\nc: 'half\n---\nd: 4\n")
    assert [found[0], found[3]] == [{"a": 1}, {"d": 4}]
    assert [fault.line for fault in found[1:3]] == [3, 5]


def test_lines_of_fields():
    (document,) = read_documents("# comment\na:\n  b:\n  - c: 1\n    d: 2\n  - c: 3\n")
    assert document.line == 2
    lines = {
        path: document.line_of(document.value, path, 2) for path in [("a",), ("a", "b", 0, "d"), ("a", "b", 1, "c")]
    }
    assert lines == {("a",): 2, ("a", "b", 0, "d"): 5, ("a", "b", 1, "c"): 6}


def test_line_of_a_field_that_is_not_there_is_its_parents():
    (document,) = read_documents("a:\n  b:\n  - c: 1\n")
    assert document.line_of(document.value, ("a", "b", 0, "port"), 1) == 3
    assert document.line_of(document.value, ("x", "y"), 1) == 1


def test_doubled_keys_can_be_borne():
    (document,) = read_documents("a: 1\na: 2\n", allow_duplicate_keys=True)
    assert (document.value, document.duplicate_keys) == ({"a": 2}, (("a", 2),))
