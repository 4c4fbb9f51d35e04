"""The playground in Debian's Chromium: the command's own answers, no requests, nothing injected, readable, and by keyboard."""

import gzip
import itertools
import json

import pytest
from click.testing import CliRunner
from tests.chromium import CONTRASTS, browser
from tests.hostile_texts import PARSERS, hostile_texts
from tests.playground.inputs import examples, requests
from tests.trace.test_render import HOSTILE

from narthex.cli import main
from narthex.trace.program import playground as served
from playground_answer import arguments

# It needs no root; but the browser and the built page are where the kernel's tests run.
pytestmark = pytest.mark.kernel

READY = "document.documentElement.dataset.ready"
ASK = """
const [request, done] = arguments;
window.narthex.trace(request).then(done, error => done({failed: String(error)}));
"""
TRACED = "/ s\\)$/.test(document.getElementById('status').textContent)"
MARKUP = "<img src=x onerror=window.harmed=1></text><script>window.harmed=1</script>\"'&lt;"


@pytest.fixture(scope="module")
def site():
    """The page's address, and the paths of all requests."""
    asked = []

    class Recorded(served.PlaygroundFiles):
        def __call__(self, request):
            asked.append(request.path)
            return super().__call__(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "PlaygroundFiles", Recorded)
        with served.playground() as address:
            yield address, asked


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as session:
        yield session


@pytest.fixture(scope="module")
def opened(site, chromium):
    chromium.size(1280, 900)
    chromium.open(site[0])
    for _ in range(10):
        # Machines are slow sometimes: several minutes are granted.
        try:
            chromium.until(f"{READY} || document.querySelector('.status.bad')")
            break
        except AssertionError:
            continue
    assert chromium.run(f"return {READY}"), chromium.run("return document.getElementById('status').textContent")
    return chromium


def ask(page, request):
    answered = page.ask("POST", "/execute/async", {"script": ASK, "args": [request]})
    assert "failed" not in answered, (request, answered["failed"])
    return answered


def choose(page, example):
    page.run("document.getElementById('status').textContent = ''")
    page.run(f"document.getElementById('example-{example}').click()")
    page.until(TRACED)


def test_every_dump_gets_the_answer_of_the_command(opened, tmp_path, monkeypatch):
    """JSON equal, with the same messages and the same exit status."""
    asked = requests()
    assert len(asked) > 80
    for number, request in enumerate(asked):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        words = arguments(request, folder)
        done = CliRunner().invoke(main, ["trace", "-o", "json", *words])
        answered = ask(opened, request)
        assert answered["arguments"] == words
        assert (answered["status"], answered["messages"]) == (done.exit_code, done.stderr), words
        if done.exit_code in (0, 3):
            assert answered["output"]["json"] == done.stdout, words


def test_hostile_dumps_get_the_answer_of_the_command(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = list(hostile_texts(PARSERS["rule dumps"]))[::40]
    assert len(texts) > 10
    for hostile in texts:
        request = {"source": "outside", "destination": "10.0.0.1:80", "options": {}}
        request["files"] = [["a.txt", hostile.of(2000)]]
        done = CliRunner().invoke(main, ["trace", "-o", "json", *arguments(request, tmp_path)])
        answered = ask(opened, request)
        assert (answered["status"], answered["messages"]) == (done.exit_code, done.stderr), hostile
        assert answered["output"].get("json", "") == (done.stdout if done.exit_code in (0, 3) else "")


def test_input_that_ends_the_interpreter_does_not_end_the_page(opened):
    deep = {"source": "outside", "destination": "10.0.0.1:80", "options": {}, "files": [["a.json", '{"a":' * 300_000]]}
    assert opened.ask("POST", "/execute/async", {"script": ASK, "args": [deep]})
    [first, *_] = examples()
    names = ("source", "destination", "options", "files")
    assert ask(opened, {name: first[name] for name in names})["status"] == 0


def test_no_request_after_the_page_has_loaded(opened, site):
    address, asked = site
    before = list(asked)
    named = opened.run("return performance.getEntriesByType('resource').map(each => each.name)")
    assert all(name.removeprefix("blob:").startswith(address) for name in named), named
    assert set(before) >= {"/", "/page.js", "/worker.js", "/narthex.zip", "/pyodide.asm.wasm", "/python_stdlib.zip"}
    choose(opened, "forward-drop")
    choose(opened, "ipvs")
    refused = "return fetch(arguments[0]).then(() => 'sent', error => error.name)"
    assert opened.run(refused, "gallery.json") == "TypeError"
    assert opened.run(refused, "http://127.0.0.1:9/") == "TypeError"
    picture = (
        "const done = arguments[0], picture = new Image(); picture.onload = () => done('sent'); "
        "picture.onerror = () => done('refused'); picture.src = 'http://127.0.0.1:9/icon.svg';"
    )
    assert opened.ask("POST", "/execute/async", {"script": picture, "args": []}) == "refused"
    assert asked == before


@pytest.mark.parametrize("hostile", [MARKUP, HOSTILE])
def test_a_hostile_dump_injects_nothing(opened, hostile):
    clean = hostile.replace("\n", " ").replace("\x00", "").encode(errors="replace").decode().replace('"', "'")
    rules = (
        "*nat\n:PREROUTING ACCEPT [0:0]\n"
        f'-A PREROUTING -d 10.0.0.1/32 -p tcp -m comment --comment "{clean}" -m tcp --dport 80 -j DNAT --to-destination 10.0.0.2:80\n'
        "COMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
    )
    opened.run("document.getElementById('clear').click()")
    opened.run(
        "document.getElementById('source').value = arguments[0]; document.getElementById('from').value = 'outside';"
        "document.getElementById('to').value = '10.0.0.1:80'; document.getElementById('ask').requestSubmit()",
        rules,
    )
    opened.until(TRACED)
    shown = opened.run("return document.getElementById('ticket').textContent")
    assert clean.split("<")[-1][:20].strip() in shown or "harmed" in shown
    bad = "#ticket script, #ticket img, #ticket iframe, #ticket a, #ticket [onerror], #ticket style, #ticket [style]"
    assert opened.run("return document.querySelectorAll(arguments[0]).length", bad) == 0
    assert opened.run("return window.harmed") is None


def test_hostile_names_of_files(opened):
    files = "const file = new File(['*nat\\nCOMMIT\\n'], arguments[0]); const moved = new DataTransfer(); moved.items.add(file);"
    opened.run(
        f"{files} const chooser = document.getElementById('chooser'); chooser.files = moved.files;"
        "chooser.dispatchEvent(new Event('change'))",
        MARKUP,
    )
    opened.until("document.querySelectorAll('#files li').length === 1")
    assert "<img" in opened.run("return document.getElementById('files').textContent")
    assert opened.run("return document.querySelectorAll('#files img, #files script').length") == 0
    opened.run("document.getElementById('clear').click()")
    assert opened.run("return window.harmed") is None


def test_a_link_holds_the_input(opened):
    choose(opened, "hairpin")
    opened.run("document.getElementById('link').click()")
    opened.until("location.hash.startsWith('#v1.')")
    link = opened.run("return location.href")
    assert len(link) < 4000
    script = "const done = arguments[1]; import('./link.js').then(each => each.inputOf(arguments[0])).then(done, e => done({failed: String(e)}))"
    hash_ = link.partition("#")[2]
    found = opened.ask("POST", "/execute/async", {"script": script, "args": [f"#{hash_}"]})
    example = next(each for each in examples() if each["id"] == "hairpin")
    assert found["files"] == [list(each) for each in example["files"]]
    assert (found["source"], found["destination"]) == (example["source"], example["destination"])
    damaged = opened.ask("POST", "/execute/async", {"script": script, "args": [f"#{hash_[:-40]}"]})
    assert "failed" in damaged


def test_the_ticket_is_copied_as_text_and_named_in_a_terminal(opened):
    choose(opened, "no-endpoints")
    opened.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    opened.click("#copy")
    opened.until("document.getElementById('status').textContent.startsWith('Copied')")
    words = opened.run("return document.getElementById('terminal').textContent")
    assert words.startswith("narthex trace --rules pasted.txt --node-ip 192.168.60.11 -- outside")


def test_both_languages(opened):
    pick = "const s = document.getElementById('language'); s.value = '{}'; s.dispatchEvent(new Event('change'))"
    choose(opened, "no-endpoints")
    english = opened.run("return [...document.querySelectorAll('[data-text]')].map(each => each.textContent)")
    opened.run(pick.format("zh"))
    assert opened.run("return document.documentElement.lang") == "zh"
    chinese = opened.run("return [...document.querySelectorAll('[data-text]')].map(each => each.textContent)")
    same = {one for one, other in zip(english, chinese, strict=True) if one == other}
    assert not same, same
    assert opened.run("return document.getElementById('story-title').textContent") == "节点端口被拒绝"
    assert "原因：" in opened.run("return document.getElementById('ticket').textContent")
    opened.run(pick.format("en"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("example", ["forward-drop", "balancing", "firewalld"])
def test_all_text_can_be_read(opened, scheme, example):
    opened.size(1280, 900)
    opened.prefer(color_scheme=scheme)
    choose(opened, example)
    found = opened.run(CONTRASTS)
    assert len(found) > 60
    assert found[0][0] >= 4.5, found[:5]


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_runs_over(opened, width):
    opened.size(width, 844)
    for example in ("forward-drop", "ipvs"):
        choose(opened, example)
        assert opened.run("return document.documentElement.scrollWidth") <= width
        over = (
            "return [...document.querySelectorAll('body *')].filter(each => !each.closest('svg') && !each.matches('.unseen, textarea') && "
            "each.clientWidth && each.scrollWidth > each.clientWidth + 1).map(each => `${each.tagName} ${each.id} ${each.className}`)"
        )
        assert opened.run(over) == []
    opened.size(1280, 900)


def test_who_listens_hears_what_everything_is(opened):
    choose(opened, "forward-drop")
    unnamed = (
        "return [...document.querySelectorAll('input, select, textarea, button, progress')].filter(each => "
        "!(each.labels && each.labels.length || each.getAttribute('aria-label') || each.textContent.trim())).map(each => each.outerHTML)"
    )
    assert opened.run(unnamed) == []
    assert opened.run("const s = document.getElementById('status'); return [s.getAttribute('role'), s.ariaLive]") == [
        "status",
        "polite",
    ]
    levels = opened.run(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].filter(each => each.getClientRects().length).map(each => Number(each.tagName[1]))"
    )
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert opened.run("return document.querySelector('#ticket svg').getAttribute('role')") == "img"
    assert opened.run("return document.querySelector('#ticket svg title').textContent")


def test_by_keyboard_alone(opened):
    opened.run("document.getElementById('clear').click(); document.querySelector('.skip').focus()")
    opened.press("Enter")
    assert opened.run("return location.hash") == "#source"
    example = next(each for each in examples() if each["id"] == "no-endpoints")
    opened.run("document.getElementById('source').value = arguments[0]", example["files"][0][1])
    opened.run("document.getElementById('from').focus()")
    opened.press(*example["source"], "Tab", *"10.96.31.77:8081", "Enter")
    opened.until(TRACED)
    assert "10.96.31.77:8081" in opened.run("return document.getElementById('ticket').textContent")
    opened.run("document.getElementById('example-hairpin').focus()")
    opened.press("Space")
    opened.until("document.activeElement.id === 'answer'")


def test_the_page_is_small_enough():
    """As a static host sends it; `make playground` refuses a larger one."""
    total = sum(len(gzip.compress(path.read_bytes(), 6)) for path in served.BUILT.iterdir())
    assert total < 12_000_000
    assert json.loads((served.BUILT / "gallery.json").read_text())[0]["files"][0][1]
