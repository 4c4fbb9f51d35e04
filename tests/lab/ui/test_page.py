"""The page in Debian's Chromium: what it shows, what the keyboard does, colours, and what strangers' names do to it."""

import contextlib
import http.client
import json
import queue
import urllib.parse
from pathlib import Path

import pytest
from tests.chromium import CONTRASTS, browser

from narthex.kube.manifests import ManifestSource
from narthex.lab.program.ui import count
from narthex.lab.ui.board import Board, picture
from narthex.lab.ui.path import path, planned
from narthex.lab.ui.serve import page
from narthex.model.net import IPFamily
from narthex.model.objects import (
    EndpointPort,
    EndpointSlice,
    NamespacedName,
    Pod,
    PodSpec,
    Service,
    ServicePort,
    SliceEndpoint,
)
from narthex.model.store import Delete, Store, Upsert

# It needs no root; but the browser is installed where the kernel's tests run.
pytestmark = pytest.mark.kernel

SHOP = Path(__file__).parents[3] / "examples" / "shop"
HOSTILE = "<img src=x onerror=window.harmed=1>\"'&lt;script>"


class Told:
    """A source that tells what a test says."""

    problems = ()

    def __init__(self, events):
        self.first, self.later = list(events), queue.Queue()

    def scan(self):
        events, self.first = self.first, []
        return events

    def changes(self, stop):
        while not stop.is_set():
            try:
                yield self.later.get(timeout=0.05)
            except queue.Empty:
                continue


@pytest.fixture(scope="module")
def shop():
    """A page over the manifests of examples/shop; strangers' names are added by the test of them."""
    source = Told(ManifestSource(SHOP).scan())
    counted = {"shop/web": 100}

    def connections():
        counted["shop/web"] += 50
        return counted

    board = Board("the shop", source, connections)
    with page(board, lambda source, target: planned(board.snapshot, source, target)) as address:
        yield source, address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as session:
        yield session


@pytest.fixture
def seen(shop, chromium):
    """The page, fresh, in a window of 1280 by 900."""
    chromium.prefer(color_scheme="light")
    chromium.size(1280, 900)
    chromium.open(shop[1])
    chromium.until("document.querySelector('[data-id=\"pod shop/web-1\"]')")
    return chromium


def box(kind, key):
    return f'[data-id="{kind} {key}"]'


def focused(session):
    return session.run("return document.activeElement.dataset.id || document.activeElement.id")


def trace_by_keyboard(session):
    """From outside to shop/web, without a mouse."""
    for _ in range(12):
        session.press("Tab")
        if focused(session).startswith("outside"):
            break
    session.press("Enter")
    while focused(session) != "service shop/web":
        before = focused(session)
        session.press("ArrowDown")
        assert focused(session) != before, "the arrow leads nowhere"
    session.press("Space")
    session.until("!document.getElementById('result').hidden")


def test_the_picture_shows_all_there_is(seen):
    labels = seen.run("return [...document.querySelectorAll('.item')].map(each => each.getAttribute('aria-label'))")
    assert "outside, a client beyond the cluster" in labels
    assert any(label.startswith("Node node-a, ready, 192.168.49.11") for label in labels)
    assert "Pod shop/web-3, not ready, on node-b, 10.244.2.11" in labels
    assert any(label.startswith("Service shop/web, LoadBalancer, 10.96.0.80") for label in labels)
    assert "EndpointSlice shop/web-1 of shop/web, IPv4, 2 of 3 ready" in labels
    # A thread from the Service to its slice and from there to each of its pods.
    assert seen.run("return document.querySelectorAll('.edge[data-from=\"slice shop/web-1\"]').length") == 3
    assert seen.run("return document.querySelectorAll('.edge[data-from=\"service shop/web\"]').length") == 1


def test_connections_are_counted_live(seen):
    said = f"document.querySelector('{box('service', 'shop/web')}').textContent"
    first = seen.until(f"({said}.match(/(\\d+) connections/) || [])[1]")
    seen.until(f"Number(({said}.match(/(\\d+) connections/) || [])[1]) > {first}")
    seen.until(f"/connections, \\d+\\/s/.test({said})")


def test_a_path_by_keyboard_alone(seen):
    trace_by_keyboard(seen)
    assert seen.run("return document.getElementById('to').value") == "shop/web:80/tcp"
    ends = seen.run("return [...document.querySelectorAll('#ends li')].map(each => each.innerText.split('\\n')[0])")
    assert ends == ["50 %", "50 %"]
    assert "plan and rules agree" in seen.run("return document.getElementById('rules').textContent")
    # Drawn over the picture: to the Service, its slice, and from there to two pods, each with its share.
    assert seen.run("return document.querySelectorAll('svg .way').length") == 4
    for pod in ("shop/web-1", "shop/web-2"):
        assert seen.run(f"return document.querySelector('{box('pod', pod)} .share').textContent") == "50 %"
    # Whoever uses the keyboard sees where they are.
    assert focused(seen) == "service shop/web"
    ring = f"getComputedStyle(document.querySelector('{box('service', 'shop/web')} .ring')).stroke"
    assert seen.run(f"return {ring}") != "none"
    seen.press("Escape")
    assert seen.run("return document.getElementById('result').hidden && document.getElementById('answer').hidden")
    assert seen.run("return document.querySelectorAll('svg .way, [aria-pressed=true]').length") == 0


def test_every_box_is_reached_with_arrows(seen):
    boxes = set(seen.run("return [...document.querySelectorAll('.item')].map(each => each.dataset.id)"))
    met, ahead = set(), ["outside outside"]
    while ahead:
        here = ahead.pop()
        if here in met:
            continue
        met.add(here)
        for arrow in ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown"):
            seen.run("document.querySelector(`[data-id='${arguments[0]}']`).focus()", here)
            seen.press(arrow)
            ahead.append(focused(seen))
    assert met == boxes


def test_a_path_by_mouse_and_from_the_form(seen):
    seen.click(box("pod", "shop/cart-1"))
    seen.click(box("pod", "shop/web-1"))
    seen.until("!document.getElementById('result').hidden")
    assert seen.run("return document.getElementById('from').value") == "shop/cart-1"
    seen.run("document.getElementById('to').value = 'shop/nobody'; document.querySelector('#ask button').click()")
    seen.until("document.getElementById('said').textContent.includes('there is no')")
    assert seen.run("return document.getElementById('said').getAttribute('aria-live')") == "polite"


def ask(session, source, destination):
    session.run("document.getElementById('clear').click(); document.getElementById('from').value = arguments[0]; document.getElementById('to').value = arguments[1]; "
                "document.querySelector('#ask button').click()", source, destination)  # fmt: skip
    session.until("!document.getElementById('answer').hidden")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_cause_is_on_top_and_the_path_is_broken_where_it_breaks(seen, width):
    seen.size(width, 900)
    ask(seen, "node-a", "shop/search")
    said = seen.run("return document.getElementById('answer').innerText")
    assert said.startswith("✕ rejected: tcp 192.168.49.11 -> 10.96.0.82:80\nthe sender receives ICMP port unreachable")
    assert "Why not: Service shop/search has no selector and no EndpointSlices" in said
    assert "no EndpointSlice has kubernetes.io/service-name=search" in said and "Give it a selector" in said
    tops = "return ['answer', 'stage', 'side', 'steps'].map(name => document.querySelector('.' + name).getBoundingClientRect().top)"
    assert seen.run(tops)[0] == min(seen.run(tops))
    (way,) = seen.run("return [...document.querySelectorAll('svg .way')].map(each => each.getAttribute('class'))")
    assert way == "way bad"
    assert seen.run("return [...document.querySelectorAll('svg .break text')].map(each => each.textContent)") == ["✕"]
    assert seen.run(f"return document.querySelector('{box('service', 'shop/search')}').classList.contains('bad')")
    assert seen.run("return document.querySelectorAll('svg .moving').length") == 0
    assert seen.run("return document.documentElement.scrollWidth") <= width
    assert seen.run(WIDE) == []


HOLD_EVENTS = """
const add = EventSource.prototype.addEventListener;
window.held = [];
EventSource.prototype.addEventListener = function (name, listener) {
  add.call(this, name, event => window.held ? window.held.push(() => listener(event)) : listener(event));
};
"""


def test_a_path_that_is_asked_for_before_the_picture_comes_is_drawn_in_it(seen, shop):
    script = seen.devtools("Page.addScriptToEvaluateOnNewDocument", source=HOLD_EVENTS)
    try:
        seen.open(shop[1])
        ask(seen, "node-a", "shop/search")
        assert seen.run("return document.querySelectorAll('svg .way').length") == 0
        seen.run("const held = window.held; window.held = null; held.forEach(each => each())")
        seen.until("document.querySelector('svg .way.bad')")
    finally:
        seen.devtools("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_outside_has_a_place_of_its_own(seen):
    places = """
    const rule = document.querySelector('svg .rule').getBoundingClientRect();
    return [...document.querySelectorAll('.item')].filter(each => each.getBoundingClientRect().top < rule.top).map(each => each.dataset.id);
    """
    assert seen.run(places) == ["outside outside"]


def crowd(count):
    """A Service with many pods on two nodes, in both IP families."""
    web = Service(name="web", namespace="many", cluster_ips=("10.96.0.99", "fd00::99"), ports=(ServicePort(port=80),))
    pods = [
        Pod(name=f"web-{n}", namespace="many", spec=PodSpec(node_name=f"node-{'ab'[n % 2]}"), ready=True,
            ips=(f"10.244.{n % 2 + 1}.{n + 100}", f"fd00:{n % 2 + 1}::{n + 100}"))
        for n in range(count)
    ]  # fmt: skip
    slices = []
    for number, family in enumerate((IPFamily.IPV4, IPFamily.IPV6)):
        held = (SliceEndpoint(pod.ips[number], node_name=pod.spec.node_name, target=pod.name) for pod in pods)
        slices.append(EndpointSlice(name=f"web-{number}", namespace="many", service_name="web", family=family, endpoints=tuple(held), ports=(EndpointPort(port=8080),)))  # fmt: skip
    return [web, *slices, *pods]


def test_many_pods_and_both_ip_families_are_shown_once(seen, shop):
    source, _ = shop
    objects = crowd(99)
    source.later.put([Upsert(each) for each in objects])
    try:
        seen.until("document.querySelector('.item.crowd')")
        labels = seen.run("return [...document.querySelectorAll('.item')].map(each => each.getAttribute('aria-label'))")
        assert [label for label in labels if "many" in label and not label.startswith("Service")] == [
            "EndpointSlice many/web-0 of many/web, IPv4 and IPv6, 99 of 99 ready",
            "50 pods of many/web, 50 of 50 ready, on node-a",
            "49 pods of many/web, 49 of 49 ready, on node-b",
        ]
        ask(seen, "shop/cart-1", "many/web")
        assert seen.run("return document.querySelectorAll('svg .way').length") == 4
        assert seen.run("return document.querySelectorAll('#ends li').length") == 9
        assert "91 more together" in seen.run("return document.getElementById('ends').innerText")
        outline = seen.run("return document.getElementById('tree').innerText")
        assert outline.count("many/web-") == 8 and "… and 91 more, 91/99 together" in outline
        ask(seen, "many/web-7", "many/web")
        assert (
            seen.run(f"return document.querySelector('{box('pod', 'many/web-7')}').getAttribute('aria-pressed')")
            == "true"
        )
    finally:
        source.later.put([Delete(type(each).__name__, each.key) for each in objects])
    seen.until("!document.querySelector('.item.crowd')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("destination", ["shop/web", "shop/search"])
def test_all_text_can_be_read(seen, scheme, destination):
    seen.prefer(color_scheme=scheme)
    ask(seen, "node-a", destination)
    seen.until(f"document.documentElement.dataset.theme === '{scheme}'")
    found = seen.run(CONTRASTS)
    assert len(found) > 50
    assert found[0][0] >= 4.5, found[:5]


def test_colours_can_be_chosen_and_stay(seen, shop):
    pick = "const s = document.getElementById('theme'); s.value = '{}'; s.dispatchEvent(new Event('change'))"
    seen.run(pick.format("dark"))
    seen.open(shop[1])
    assert seen.run("return document.documentElement.dataset.theme") == "dark"
    assert seen.run("return document.getElementById('theme').value") == "dark"
    seen.run(pick.format("auto"))
    assert seen.run("return document.documentElement.dataset.theme") == "light"


WIDE = """
return [...document.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth &&
  ['auto', 'scroll'].includes(getComputedStyle(each).overflowX)).map(each => each.id || each.className);
"""
"""What has to be scrolled sideways."""


@pytest.mark.parametrize("width", [1280, 640, 390])
def test_nothing_is_cut_off_or_runs_over_also_at_200_percent(seen, width):
    seen.size(width, 450)
    trace_by_keyboard(seen)
    assert seen.run("return document.documentElement.scrollWidth") <= width
    assert seen.run(WIDE) == []
    over = """
    return [...document.querySelectorAll('.item')].flatMap(item => {
      const box = item.querySelector('.box').getBoundingClientRect();
      return [...item.querySelectorAll('text')].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < box.left || own.right > box.right + 1 || own.bottom > box.bottom + 1;
      }).map(text => text.textContent);
    });
    """
    assert seen.run(over) == []


def test_nothing_moves_for_whoever_wants_that(seen):
    moving = "getComputedStyle(document.querySelector('.moving')).animationName"
    trace_by_keyboard(seen)
    assert seen.run(f"return {moving}") == "flow"
    seen.prefer(color_scheme="light", reduced_motion="reduce")
    assert seen.run(f"return {moving}") == "none"


def test_what_changes_is_drawn_at_once_and_the_focus_stays(seen, shop):
    source, _ = shop
    seen.run(f"document.querySelector('{box('pod', 'shop/web-2')}').focus()")
    new = Pod(name="new", namespace="shop", spec=PodSpec(node_name="node-a"), ips=("10.244.1.99",), ready=True)
    source.later.put([Upsert(new)])
    seen.until(f"document.querySelector('{box('pod', 'shop/new')}')")
    assert focused(seen) == "pod shop/web-2"
    source.later.put([Delete("Pod", new.key)])
    seen.until(f"!document.querySelector('{box('pod', 'shop/new')}')")


def test_a_strangers_name_is_text(seen, shop):
    """No decoder lets such a name in; the page would not mind."""
    source, _ = shop
    pod = Pod(name=HOSTILE, namespace="shop", spec=PodSpec(node_name=HOSTILE), ips=("10.244.1.66",))
    service = Service(
        name=HOSTILE, namespace="shop", cluster_ips=(HOSTILE,), ports=(ServicePort(name=HOSTILE, port=1),)
    )
    source.later.put([Upsert(pod), Upsert(service)])
    seen.until("document.querySelectorAll('.item').length > 13")
    labels = seen.run("return [...document.querySelectorAll('.item')].map(each => each.getAttribute('aria-label'))")
    assert sum(HOSTILE in label for label in labels) == 3
    seen.run("[...document.querySelectorAll('.item.pod')].find(each => each.dataset.id.includes('img')).focus()")
    seen.press("Enter", "End", "Enter")
    seen.until("document.getElementById('said').textContent.length > 3")
    assert seen.run("return document.querySelectorAll('body img, body script, svg image, svg a').length") == 0
    assert seen.run("return window.harmed") is None
    source.later.put([Delete("Pod", pod.key), Delete("Service", service.key)])
    seen.until("document.querySelectorAll('.item').length <= 13")


# Without a browser.


def fetch(address, target, host=None, cookie=""):
    port = urllib.parse.urlsplit(address).port
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.putrequest("GET", target, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.putheader("Cookie", cookie)
        connection.endheaders()
        with connection.getresponse() as answer:
            endless = target == "/events" and answer.status == 200
            return answer.status, dict(answer.headers), b"" if endless else answer.read()


def test_who_has_no_token_or_comes_under_another_name_gets_nothing(shop):
    _, address = shop
    split = urllib.parse.urlsplit(address)
    status, headers, _ = fetch(address, f"/?{split.query}")
    assert (status, headers["location"]) == (303, "/")
    set_cookie = headers["set-cookie"].lower()
    assert "httponly" in set_cookie
    assert "samesite=strict" in set_cookie
    cookie = headers["set-cookie"].partition(";")[0]
    for target in ("/", "/page.js", "/events", "/path?from=outside&to=shop/web", "/?token=wrong"):
        assert fetch(address, target)[0] == 403
        assert fetch(address, target, cookie=cookie.partition("=")[0] + "=wrong")[0] == 403
        assert fetch(address, target, cookie=cookie)[0] == 200
        assert fetch(address, target, host="rebound.example", cookie=cookie)[0] == 421
    assert fetch(address, f"/?{split.query}", host="rebound.example")[0] == 421
    assert fetch(address, "/static/../../pages.py", cookie=cookie)[0] == 404
    _, headers, _ = fetch(address, "/", cookie=cookie)
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]


def test_a_path_as_data(shop):
    _, address = shop
    _, headers, _ = fetch(address, f"/?{urllib.parse.urlsplit(address).query}")
    cookie = headers["set-cookie"].partition(";")[0]
    _, _, body = fetch(address, "/path?from=shop/web-1&to=shop/cart:9000", cookie=cookie)
    found = json.loads(body)
    assert (found["service"], found["agree"]) == ("shop/cart", True)
    assert sum(end["probability"] for end in found["ends"]) == pytest.approx(1)
    assert {end["key"] for end in found["ends"]} == {"shop/cart-1", "shop/cart-2"}


def snapshot():
    store = Store()
    for event in ManifestSource(SHOP).scan():
        store.apply(event)
    return store.snapshot


def test_a_picture_holds_pods_that_only_slices_tell_of():
    drawn = picture(snapshot())
    assert [node["key"] for node in drawn["nodes"]] == ["node-a", "node-b"]
    pods = {pod["key"]: pod for pod in drawn["pods"]}
    assert pods["shop/web-1"] == {
        "key": "shop/web-1", "node": "node-a", "addresses": ["10.244.1.10"], "state": "ready", "ports": ["8080/tcp"],
    }  # fmt: skip
    assert pods["shop/web-3"]["state"] == "not ready"


@pytest.mark.parametrize(
    ("phase", "state"), [("Succeeded", "completed"), ("Failed", "failed"), ("Running", "not ready")]
)
def test_a_pod_that_has_ended_is_not_one_that_is_not_ready(phase, state):
    store = Store()
    store.apply(Upsert(Pod(name="job", namespace="shop", phase=phase)))
    assert [pod["state"] for pod in picture(store.snapshot)["pods"]] == [state]


def test_a_question_that_cannot_be_asked_is_answered():
    objects = snapshot()
    found = path(lambda one, other: planned(objects, one, other), objects, "nobody", "shop/web")
    assert "there is no 'nobody'" in found["error"]
    assert NamespacedName("shop", "web") in objects.services


def test_connections_of_several_nodes_are_added():
    line = b'narthex_service_new_connections_total{namespace="shop",service="web",port="http",protocol="TCP",ip_family="%s"} %s\n'
    pages = [line % (b"IPv4", b"3.0") + line % (b"IPv6", b"1e+03"), b"# HELP nothing\n" + line % (b"IPv4", b"4.0")]
    assert count(pages) == {"shop/web": 1007}
