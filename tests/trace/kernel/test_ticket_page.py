"""The page for a ticket in Debian's Chromium: columns fit, words are not split, and verdicts are not cut off."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.chromium import browser

from narthex.cli import main

# It needs no root; but the browser is installed where the kernel's tests run.
pytestmark = pytest.mark.kernel

ROOT = Path(__file__).parents[3]
SHOP = ("--manifests", str(ROOT / "examples" / "shop"), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16")
HELLO = ROOT / "tests" / "dumps" / "hello-world.iptables-save"

SPLIT = """
const found = [], walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
for (let node; node = walker.nextNode();) {
  if (node.parentElement.closest('svg, style') || !node.parentElement.getClientRects().length) continue;
  for (const match of node.data.matchAll(/(?<!\\S)[^\\s-]{2,32}(?!\\S)/g)) {
    const range = document.createRange();
    range.setStart(node, match.index);
    range.setEnd(node, match.index + match[0].length);
    if (new Set([...range.getClientRects()].map(each => Math.round(each.top))).size > 1) found.push(match[0]);
  }
}
return found;
"""
"""Words that are on two lines, without those with a hyphen, where a line may break."""
CUT_OFF = """
return [...document.querySelectorAll('svg .chip')].flatMap(chip => {
  const [box, text] = [chip, chip.nextElementSibling].map(each => each.getBoundingClientRect());
  const frame = document.querySelector('svg').getBoundingClientRect();
  const fits = text.left >= box.left && text.right <= box.right && box.right <= frame.right;
  return fits && !chip.nextElementSibling.textContent.includes('…') ? [] : [chip.nextElementSibling.textContent];
});
"""
OVER = """
return [...document.querySelectorAll('main *')].filter(each => !each.closest('svg') && each.scrollWidth > each.clientWidth + 1 &&
  each.clientWidth).map(each => `${each.tagName} ${each.className}: ${each.textContent.slice(0, 60)}`);
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as session:
        yield session


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("form", ["objects", "objects and rules", "dump", "refused"])
def test_the_page_fits(tmp_path, chromium, form, width):
    rules = tmp_path / "rules.txt"
    rules.write_text(CliRunner().invoke(main, ["render", "--mode", "iptables", *SHOP]).output)
    words = {
        "objects": ("outside", "shop/web", *SHOP),
        "objects and rules": ("shop/cart-1", "shop/web", *SHOP, "--mode", "iptables", "--rules", str(rules)),
        "dump": ("outside", "10.0.0.5:30001", "--rules", str(HELLO), "--node-ip", "10.0.0.5"),
        "refused": ("node-a", "shop/search", *SHOP),
    }[form]
    done = CliRunner().invoke(main, ["trace", *words, "-o", "html"])
    assert done.exit_code == 0, done.output
    (tmp_path / "path.html").write_text(done.output)
    chromium.size(width, 900)
    chromium.open(f"file://{tmp_path}/path.html")
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert chromium.run(OVER) == []
    assert chromium.run(SPLIT) == []
    if width > 720:
        assert chromium.run("return document.querySelectorAll('svg .chip').length") > 0
        assert chromium.run(CUT_OFF) == []
    verdict = "return document.querySelector('.result').textContent"
    assert chromium.run(verdict)[0] in "✓✕→"
