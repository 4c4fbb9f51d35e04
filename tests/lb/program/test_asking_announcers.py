"""`lb why` of a cluster: announcers are asked at the health port, and through the API server where a node is out of reach."""

import http.server
import json
import threading
from pathlib import Path

import pytest
import yaml

from narthex.cli.lb import why as why_command
from narthex.kube.access import Access
from narthex.lb.program import inspection
from narthex.testing.build import node, snapshot

ROOT = Path(__file__).parents[3]
STATE = {"node": "", "standingBack": False, "leaving": False, "links": [], "peers": [], "addresses": []}


@pytest.fixture
def server():
    """A node's health port, and the API server that reaches the others."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            name = self.path.removeprefix("/api/v1/nodes/http:").partition(":")[0]
            code = 200 if name in ("b", "c", "/announcer") else 503
            body = json.dumps({**STATE, "node": name}).encode() if code == 200 else b"{}"
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made.server_address[1], asked
        made.shutdown()
        thread.join(10)


def test_announcers_are_asked_directly_and_then_through_the_api_server(server):
    port, asked = server
    ips = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "", "d": "127.0.0.2"}
    known = snapshot(*(node(name, internal_ips=(ip,) if ip else ()) for name, ip in ips.items()))
    found = inspection._states(known, port, Access(master=f"http://127.0.0.1:{port}"))
    assert {name: state.node for name, state in found.items()} == {"a": "/announcer", "b": "b", "c": "c"}
    assert set(asked) == {"/announcer", *(f"/api/v1/nodes/http:{name}:{port}/proxy/announcer" for name in "bcd")}
    assert set(inspection._states(known, port, None)) == {"a"}


def test_the_port_is_one_that_deploy_opens_to_other_machines():
    first = next(yaml.safe_load_all((ROOT / "deploy" / "config.conf").read_text()))
    address, _, port = first["healthzBindAddress"].rpartition(":")
    (option,) = (one for one in why_command.params if one.name == "status_port")
    assert (address, int(port)) == ("0.0.0.0", inspection.STATUS_PORT) == ("0.0.0.0", option.default)
