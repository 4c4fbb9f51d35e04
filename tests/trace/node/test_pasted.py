"""What a user pasted, sorted into bundles, manifests, and output of tools."""

import io
import tarfile
import time

import pytest

from narthex.trace.node.pasted import PastedFile, PastedKind, sort_pasted

SERVICE = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n"
RULES = "*nat\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n"
REPORT = f"It fails.\n\n```yaml\n{SERVICE}```\n\n```\n{RULES}```\n"


def kinds(*files: tuple[str, str | bytes]) -> list[tuple[PastedKind, str]]:
    return [(each.kind, each.name) for each in sort_pasted(files)]


def test_texts_are_manifests_or_output():
    json = '{"apiVersion": "v1", "kind": "List", "items": []}'
    items = "- apiVersion: v1\n  kind: Service\n"
    assert kinds(("a", SERVICE), ("b.yml", SERVICE), ("c", json), ("d", items), ("e", RULES), ("f", "")) == [
        (PastedKind.MANIFESTS, "a.yaml"),
        (PastedKind.MANIFESTS, "b.yml"),
        (PastedKind.MANIFESTS, "c.json"),
        (PastedKind.MANIFESTS, "d.yaml"),
        (PastedKind.OUTPUT, "e"),
        (PastedKind.OUTPUT, "f"),
    ]


def test_rules_in_json_are_output():
    assert kinds(("a", '{"nftables": [{"metainfo": {}}]}')) == [(PastedKind.OUTPUT, "a")]


def test_archives_are_bundles():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("narthex-bundle/manifest.tsv"))
    assert kinds(("a.tgz", b"\x1f\x8b\x08rest"), ("b", file.getvalue())) == [
        (PastedKind.BUNDLE, "a.tgz"),
        (PastedKind.BUNDLE, "b"),
    ]


@pytest.mark.parametrize("indent", ["", "   "])
@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_manifests_are_taken_out_of_a_report_that_keeps_its_lines(indent, fence):
    text = "".join(f"{indent}{line}\n" for line in REPORT.replace("```", fence).splitlines())
    report, manifest = sorted(sort_pasted([("report.md", text)]), key=lambda each: -len(each.name))[::-1]
    assert manifest == PastedFile(PastedKind.MANIFESTS, "report.md.1.yaml", SERVICE.encode())
    assert (report.kind, report.name) == (PastedKind.OUTPUT, "report.md")
    lines = report.content.decode().splitlines()
    assert len(lines) == len(text.splitlines())
    assert lines.index(f"{indent}*nat") == text.splitlines().index(f"{indent}*nat")
    assert "Service" not in report.content.decode()


def test_rules_and_manifests_without_fences_are_output():
    assert kinds(("a", SERVICE + RULES)) == [(PastedKind.OUTPUT, "a")]


def test_names_are_harmless_and_unique():
    names = ["../../etc/passwd", "C:\\rules;rm -rf.txt", "-o", "", "manifests", "-o", "x" * 300]
    found = [each.name for each in sort_pasted([(name, RULES) for name in names])]
    assert found == ["passwd", "rules_rm_-rf.txt", "o", "pasted.txt", "2-manifests", "2-o", "x" * 80]


def test_a_bytes_that_are_no_text_are_replaced():
    [found] = sort_pasted([("a", b"-A X -m comment --comment \xff\xfe -j ACCEPT\n")])
    assert found.kind is PastedKind.OUTPUT


def seconds(text: str) -> float:
    begin = time.process_time()
    sort_pasted([("a", text)])
    return time.process_time() - begin


@pytest.mark.parametrize("word", ["```a\n", "```\n", "~~~\n```\n", "apiVersion: v1\n", "   ```", "[{", "kind: \n"])
def test_twice_the_text_takes_no_more_than_thrice_the_time(word):
    small, large = (min(seconds(word * (size // len(word))) for _ in range(3)) for size in (200_000, 400_000))
    assert large < 3 * small + 0.2
