"""Writing objects, against the API server for tests: preconditions, the three patches, and what each refusal says."""

import asyncio
import json
import socket
import threading

import pytest

from narthex.kube import client
from narthex.kube.access import Access
from narthex.kube.client import AlreadyExistsError, ApiError, ConflictError, NoResponseError, NotFoundError, writing
from narthex.testing.apiserver import DropConnection, FaultyApiServer, Refuse
from narthex.testing.build import service

WEB = "/api/v1/namespaces/shop/services/web"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/shop/leases"


@pytest.fixture
def server():
    with FaultyApiServer() as server:
        server.put(service("shop/web", "10.110.0.1"))
        yield server


def do(server, work):
    async def run():
        async with writing(Access(master=server.url), 10) as writer:
            return await work(writer)

    return asyncio.run(run())


def status_of(*ips):
    return {"status": {"loadBalancer": {"ingress": [{"ip": ip} for ip in ips]}}}


def test_a_status_is_changed_through_its_own_path_only(server):
    async def work(writer):
        aside = await writer.patch(WEB, status_of("192.0.2.1"))
        there = await writer.patch(WEB, status_of("192.0.2.1") | {"spec": {"type": "X"}}, subresource="status")
        return aside, there

    aside, there = do(server, work)
    assert "status" not in aside
    assert there["status"] == status_of("192.0.2.1")["status"]
    assert there["spec"] == aside["spec"]


def test_what_changes_nothing_makes_no_new_version(server):
    async def work(writer):
        return [
            (await writer.patch(WEB, status_of("192.0.2.1"), subresource="status"))["metadata"]["resourceVersion"]
            for _ in range(2)
        ]

    first, second = do(server, work)
    assert first == second


@pytest.mark.parametrize("verb", ["merge patch", "status patch", "put"])
def test_an_old_version_is_a_conflict(server, verb):
    async def work(writer):
        old = await writer.get(WEB)
        await writer.patch(WEB, {"metadata": {"labels": {"a": "b"}}})
        version = old["metadata"]["resourceVersion"]
        if verb == "put":
            await writer.update(WEB, old)
        else:
            body = {"metadata": {"resourceVersion": version}, **status_of("192.0.2.1")}
            await writer.patch(WEB, body, subresource="status" if verb == "status patch" else "")

    with pytest.raises(ConflictError, match="read it again and decide again"):
        do(server, work)
    assert server.writes[-1][1] == 409
    assert "status" not in server.do(lambda data: data.get("Service", ("shop", "web"))).raw


def test_the_present_version_is_none(server):
    async def work(writer):
        there = await writer.get(WEB)
        there["metadata"]["labels"] = {"a": "b"}
        return await writer.update(WEB, there)

    assert do(server, work)["metadata"]["labels"] == {"a": "b"}


def test_conditions_are_merged_by_type(server):
    def condition(type_, status):
        return {"status": {"conditions": [{"type": type_, "status": status}]}}

    async def work(writer):
        for type_, status in (("One", "True"), ("Two", "True"), ("One", "False")):
            done = await writer.patch(WEB, condition(type_, status), kind="strategic", subresource="status")
        return done["status"]["conditions"]

    assert do(server, work) == [{"type": "One", "status": "False"}, {"type": "Two", "status": "True"}]


def test_null_removes(server):
    async def work(writer):
        await writer.patch(WEB, {"metadata": {"annotations": {"a": "1", "b": "2"}}})
        return await writer.patch(WEB, {"metadata": {"annotations": {"a": None}}})

    assert do(server, work)["metadata"]["annotations"] == {"b": "2"}


def test_a_json_patch_is_all_or_nothing(server):
    async def work(writer):
        good = [{"op": "add", "path": "/metadata/labels", "value": {"x/y": "1"}}]
        bad = [
            {"op": "replace", "path": "/metadata/labels/x~1y", "value": "2"},
            {"op": "test", "path": "/metadata/name", "value": "z"},
        ]
        await writer.patch(WEB, good, kind="json")
        with pytest.raises(ApiError, match="422 Invalid"):
            await writer.patch(WEB, bad, kind="json")
        return await writer.get(WEB)

    assert do(server, work)["metadata"]["labels"] == {"x/y": "1"}


def test_creating_twice_deleting_twice(server):
    async def work(writer):
        body = {"metadata": {"name": "one"}, "spec": {"holderIdentity": "me"}}
        made = await writer.create(LEASES, body)
        with pytest.raises(AlreadyExistsError):
            await writer.create(LEASES, body)
        await writer.delete(f"{LEASES}/one")
        with pytest.raises(NotFoundError):
            await writer.delete(f"{LEASES}/one")
        return made

    made = do(server, work)
    assert made["metadata"]["namespace"] == "shop"
    assert made["metadata"]["uid"]


def test_a_lease_is_not_updated_without_a_version(server):
    async def work(writer):
        await writer.create(LEASES, {"metadata": {"name": "one"}})
        await writer.update(f"{LEASES}/one", {"metadata": {"name": "one"}})

    with pytest.raises(ApiError, match="must be specified for an update"):
        do(server, work)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (Refuse(403), ApiError, "grant the verb patch on it"),
        (Refuse(500), ApiError, "it will be retried"),
        (Refuse(404), NotFoundError, "gone, or its kind is not installed"),
        (DropConnection(), NoResponseError, "it will be retried"),
    ],
)
def test_refusals_name_the_object_and_the_way_out(server, fault, error, said):
    server.faults = lambda seen: fault if seen.method == "PATCH" else None
    with pytest.raises(error, match=f"PATCH {WEB}: .*{said}"):
        do(server, lambda writer: writer.patch(WEB, {"metadata": {"labels": {"a": "b"}}}))


def test_an_answer_that_is_lost_does_not_undo_the_write(server):
    server.faults = lambda seen: DropConnection(10) if seen.method == "PATCH" else None
    with pytest.raises(NoResponseError):
        do(server, lambda writer: writer.patch(WEB, {"metadata": {"labels": {"a": "b"}}}))
    assert server.do(lambda data: data.get("Service", ("shop", "web"))).raw["metadata"]["labels"] == {"a": "b"}


def test_kinds_that_are_not_installed(server):
    server.abilities = type(server.abilities)(missing=frozenset({"Lease"}))
    with pytest.raises(NotFoundError):
        do(server, lambda writer: writer.create(LEASES, {"metadata": {"name": "one"}}))


def test_lists_of_one_namespace(server):
    server.put(service("other/web", "10.110.0.2"))
    found = do(server, lambda writer: writer.get("/api/v1/namespaces/other/services"))
    assert [each["metadata"]["namespace"] for each in json.loads(json.dumps(found))["items"]] == ["other"]


def test_a_warning_of_the_server_is_shown_once(caplog, monkeypatch):
    monkeypatch.setattr(client, "_shown_warnings", set())
    endpoints = '299 - "v1 Endpoints is deprecated in v1.33+; use \\"EndpointSlice\\""'
    client.show_warnings(
        [endpoints, f'{endpoints}, 299 kube "spec.externalIPs is deprecated"', '199 - "not ours"', "nonsense"]
    )
    client.show_warnings([endpoints])
    assert caplog.messages == [
        'the API server warns: v1 Endpoints is deprecated in v1.33+; use "EndpointSlice"',
        "the API server warns: spec.externalIPs is deprecated",
    ]
    client.show_warnings([f'299 - "{number}"' for number in range(1000)])
    assert len(caplog.messages) == 100, "a server cannot fill the log"


def test_warnings_of_reads_and_writes_are_shown(caplog, monkeypatch):
    monkeypatch.setattr(client, "_shown_warnings", set())
    said = b'HTTP/1.1 200 OK\r\nWarning: 299 - "v1 Thing is deprecated"\r\nContent-Length: 2\r\n\r\n{}'

    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(said)

    async def read():
        async with writing(Access(master=f"http://127.0.0.1:{listener.getsockname()[1]}"), 30) as writer:
            return await writer.get(WEB)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        assert asyncio.run(read()) == {}
        thread.join(30)
    assert caplog.messages == ["the API server warns: v1 Thing is deprecated"]
