"""The public API, and the example of its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narthex
from narthex.model.net import IPFamily

ROOT = Path(__file__).parents[1]
SHOP = ROOT / "examples" / "shop"
EXAMPLE = ROOT / "examples" / "api" / "explain_path.py"
PAGE = ROOT / "docs" / "reference" / "api.md"


@pytest.fixture
def shop():
    return narthex.load(SHOP, node="node-a", cluster_cidr="10.244.0.0/16")


def test_the_example_explains_and_draws_a_path(tmp_path):
    picture = tmp_path / "path.svg"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(SHOP), str(picture)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "delivered to 10.244.1.10:8080" in done.stdout
    assert picture.read_text().startswith("<?xml")


def test_the_page_shows_the_example():
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    assert code in PAGE.read_text()
    assert len([line for line in code.splitlines() if line]) <= 10


def test_the_page_names_everything_public():
    assert [name for name in narthex.__all__ if not name.startswith("_") and f"| `{name}" not in PAGE.read_text()] == []
    assert all(hasattr(narthex, name) for name in narthex.__all__)


def test_a_plan_and_its_rules(shop):
    (plan,) = narthex.plan(shop).values()
    assert plan.family is IPFamily.IPV4 and len(plan.services) == 3
    assert "map services" in narthex.render(shop)[IPFamily.IPV4]


def test_an_explanation_has_every_form(shop):
    explanation = narthex.trace(shop, "outside", "node-a:30080")
    assert str(explanation).startswith("✓ delivered: ")
    assert json.loads(explanation.json())["kind"] == "trace"
    assert [explanation.picture(format)[:5] for format in ("svg", "html", "dot", "mermaid")] == [
        "<?xml",
        "<!DOC",
        "digra",
        "flowc",
    ]


def test_rules_are_compared_with_the_objects(shop, tmp_path):
    dump = tmp_path / "rules.nft"
    dump.write_text(narthex.render(shop)[IPFamily.IPV4])
    (same,) = narthex.check(shop, (dump,))
    assert (same.status, same.findings) == (0, ())
    dump.write_text(dump.read_text().replace("10.244.1.10", "10.244.1.99"))
    (differs,) = narthex.check(shop, (dump,))
    assert differs.status == 1
    assert "becomes" in str(narthex.trace(shop, "outside", "node-a:30080", rules=(dump,)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: narthex.load("/nonexistent"), "/nonexistent"),
        (lambda: narthex.load(SHOP), "which node"),
        (lambda: narthex.render(narthex.load(SHOP, node="node-a", mode="none")), "mode 'none' does not exist"),
        (lambda: narthex.trace(narthex.load(SHOP, node="node-a"), "nowhere", "node-a:1"), "nowhere"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(narthex.InputError, match=message):
        call()


def test_the_package_stays_light():
    """The CNI plugins import it."""
    code = "import sys; before = set(sys.modules); import narthex; print(*sorted(set(sys.modules) - before))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["narthex"]
