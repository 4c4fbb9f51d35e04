"""Debian's Chromium, driven as WebDriver says (https://www.w3.org/TR/webdriver2/): just what the tests of the page need."""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Space": "\ue00d", "ArrowLeft": "\ue012", "ArrowUp": "\ue013",
    "ArrowRight": "\ue014", "ArrowDown": "\ue015", "End": "\ue010", "Home": "\ue011", "Shift": "\ue008",
}  # fmt: skip
SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--no-proxy-server", "--window-size=1280,900",
)  # fmt: skip


class Browser:
    """One session; commands in the words of the tests."""

    def __init__(self, port: int, profile: Path) -> None:
        self.port = port
        chrome = {"binary": shutil.which("chromium"), "args": [*SWITCHES, f"--user-data-dir={profile}"]}
        self.base = ""
        wanted = {"alwaysMatch": {"goog:chromeOptions": chrome, "timeouts": {"script": 60000, "pageLoad": 60000}}}
        self.base = f"/session/{self.ask('POST', '/session', {'capabilities': wanted})['sessionId']}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, self.base + path, None if body is None else json.dumps(body))
            value = json.loads(connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{value['error']}: {value['message']}")
        return value

    def open(self, address: str) -> None:
        self.ask("POST", "/url", {"url": address})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a JavaScript function's body."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, script: str, *args: Any) -> Any:
        """Wait until an expression is true, a minute at most; its value."""
        waiting = (
            "const done = arguments[arguments.length - 1], args = arguments; const end = Date.now() + 55000;"
            f"const look = () => {{ let found; try {{ found = (() => {{ return {script}; }})(); }} catch (e) {{ found = null; }}"
            " if (found || Date.now() > end) done(found); else setTimeout(look, 30); }; look();"
        )
        found = self.ask("POST", "/execute/async", {"script": waiting, "args": list(args)})
        assert found, f"not within a minute: {script}\nthe page says: {self.run('return document.body.innerText')}"
        return found

    def press(self, *names: str) -> None:
        """Keys, by name or as text, one after the other, to whatever has the focus."""
        actions = []
        for name in names:
            for key in [KEYS[name]] if name in KEYS else list(name):
                actions += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.ask("POST", f"/element/{found[ELEMENT]}/click", {})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def prefer(self, **features: str) -> None:
        """What the system prefers: `color_scheme="dark"`, `reduced_motion="reduce"`."""
        told = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=told)

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))

    def quit(self) -> None:
        self.ask("DELETE", "")


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A browser with a profile of its own below `folder`."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0", f"--log-path={folder / 'driver.log'}", "--log-level=WARNING"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    try:
        assert driver.stdout is not None
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver has not begun")
        session = Browser(int(found[1]), folder / "profile")
        try:
            yield session
        finally:
            session.quit()
    finally:
        # The browser belongs to the driver's session, should it not have ended with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGTERM)
        if driver.stdout is not None:
            driver.stdout.close()
        driver.wait(30)


CONTRASTS = """
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => { const part = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  return .2126 * part(r) + .7152 * part(g) + .0722 * part(b); };
const ground = element => { for (let at = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour; } };
const found = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const svg = element.ownerSVGElement;
  if (!own && !element.matches('input, select') || element.matches('title, script, option, .skip') || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), item = element.closest('.item');
  const front = parse(svg ? style.fill : style.color);
  const back = svg ? item ? parse(getComputedStyle(item.querySelector('.box')).fill) : ground(svg) : ground(element);
  const [a, b] = [light(front), light(back)].sort((one, other) => other - one);
  found.push([(a + .05) / (b + .05), element.textContent.trim().slice(0, 40) || element.id]);
}
return found.sort((one, other) => one[0] - other[0]);
"""
"""How well each text can be told from what is behind it, the worst first, with its begin (WCAG 2: at least 4.5)."""
