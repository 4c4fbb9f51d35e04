"""An announcer with an API server: its lists, what it says without pools, and the condition that it writes."""

import pytest

from narthex.linux.namespaces import in_namespace
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.kernel.segment import VIP, EthernetSegment, endpoints, node, pool, service
from narthex.testing.load import until

pytestmark = pytest.mark.kernel


def condition(server):
    raw = server.do(lambda data: data.get("Service", ("shop", "web"))).raw
    found = [each for each in raw["status"].get("conditions", ()) if each["type"] == "narthex/Announced"]
    return found[0] if found else {}


def test_with_an_api_server(tmp_path):
    with EthernetSegment(tmp_path, "nxb", nodes=("a",)) as segment:
        with in_namespace(segment.ns("a")):
            server = FaultyApiServer()
            server.start()
        try:
            for each in (node("a", "192.0.2.1"), service("web", VIP), endpoints("web", "a")):
                server.put_raw(each["kind"], each)
            server.put_raw("IPAddressPool", pool("lan", "192.0.2.192/28"))
            segment.start("a", origin=("--master", server.url))
            until(lambda: segment.holders() == ["a"], "the holder", also=segment.logs)
            assert segment.ask() == "a"
            until(lambda: condition(server).get("status") == "True", "the condition", also=segment.logs)
            assert condition(server)["message"].startswith(f"{VIP} by a; no L2Advertisement selects pool lan")
            server.put_raw("EndpointSlice", endpoints("web"))
            until(lambda: condition(server).get("reason") == "NoEndpoint", "the other condition", also=segment.logs)
            assert segment.ask(seconds=0.2) == ""
        finally:
            segment.kill("a")
            server.__exit__(None, None, None)
