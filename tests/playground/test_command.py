"""`narthex playground`: the built folder on a loopback port, and what to do without one."""

import contextlib
import http.client
import urllib.parse

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.trace.program.playground import playground


def fetch(address, method, target):
    port = urllib.parse.urlsplit(address).port
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()


@pytest.fixture
def folder(tmp_path):
    for name, content in (("index.html", "<p>hello"), ("a.wasm", "\0asm"), ("b.mjs", "1"), ("secret.txt", "no")):
        (tmp_path / name).write_text(content)
    return tmp_path


def test_files_are_sent_with_their_types(folder):
    with playground(folder) as address:
        status, headers, body = fetch(address, "GET", "/")
        assert (status, body, headers["content-type"]) == (200, b"<p>hello", "text/html; charset=utf-8")
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert fetch(address, "GET", "/a.wasm")[1]["content-type"] == "application/wasm"
        assert fetch(address, "GET", "/b.mjs")[1]["content-type"] == "text/javascript; charset=utf-8"
        for target in ("/secret.txt", "/../pyproject.toml", "/%2e%2e/a", "//a.wasm", "/nothing"):
            assert fetch(address, "GET", target)[0] == 404
        assert fetch(address, "POST", "/")[0] == 405


def test_without_the_built_page_the_command_says_how_to_get_it(tmp_path):
    done = CliRunner().invoke(main, ["playground", "--site", str(tmp_path)])
    assert done.exit_code == 1
    assert f"{tmp_path} holds no playground: run `make playground`" in done.stderr


def test_a_port_in_use_is_named(folder):
    with playground(folder) as address:
        port = str(urllib.parse.urlsplit(address).port)
        done = CliRunner().invoke(main, ["playground", "--site", str(folder), "--port", port])
    assert done.exit_code == 1
    assert f"cannot listen on port {port} of 127.0.0.1" in done.stderr
