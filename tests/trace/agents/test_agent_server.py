"""`narthex mcp`, asked by the client of the official package over standard input and output."""

import asyncio
import json
import os
import sys
from pathlib import Path

import jsonschema
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

ROOT = Path(__file__).parents[3]
REPORT = ROOT / "examples" / "bug-report" / "docker-update.md"
SHOP = {"node": "node-a", "cluster_cidr": "10.244.0.0/16"}
SCHEMA = json.loads((ROOT / "docs" / "reference" / "schemas" / "narthex.v1.json").read_text())
QUESTION = {"source": "10.244.1.9", "destination": "10.96.31.6:80"}


def conversation(talk, *options):
    """Run a conversation with a server that is started with options."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "narthex", "mcp", *map(str, options)], env=environment
    )

    async def run():
        async with Client(stdio_client(server)) as client:
            return await talk(client)

    return asyncio.run(run())


def shop():
    return ["\n---\n".join(path.read_text() for path in sorted((ROOT / "examples" / "shop").glob("*.yaml")))]


async def ask(client, name, **arguments):
    """Return the structured answer of a tool, or the text of its error."""
    result = await client.call_tool(name, arguments)
    text = result.content[0].text
    return text if result.is_error else json.loads(text)


def test_a_bug_report_is_explained_with_evidence():
    async def talk(client):
        tools = {each.name: each for each in (await client.list_tools()).tools}
        answer = await ask(client, "trace", texts=[REPORT.read_text()], **QUESTION)
        whole = await client.read_resource(answer["evidence"])
        part = await ask(client, "evidence", reference=answer["evidence"] + "/findings/0/evidence/0")
        return tools, answer, json.loads(whole.contents[0].text), part

    tools, answer, document, part = conversation(talk)
    assert sorted(tools) == ["causes", "check", "evidence", "plan", "query", "trace"]
    assert all(each.annotations.read_only_hint for each in tools.values())
    jsonschema.validate(answer, tools["trace"].output_schema)
    jsonschema.validate({"texts": ["x"], **QUESTION}, tools["trace"].input_schema)
    jsonschema.validate(document, SCHEMA)
    assert [cause["cause"] for cause in answer["causes"]] == ["forward-drop"]
    assert "ACCEPT" in answer["causes"][0]["advice"]
    assert {end["fate"] for end in answer["ends"]} == {"dropped"}
    assert part == "filter FORWARD: policy drop"
    assert len(json.dumps(answer)) < len(json.dumps(document)) / 4


def test_check_plan_query_and_causes():
    rules = (ROOT / "examples" / "bug-report" / "shop-node-a.txt").read_text()

    async def talk(client):
        tools = {each.name: each for each in (await client.list_tools()).tools}
        answers = {
            "check": await ask(client, "check", texts=[*shop(), rules], **SHOP),
            "plan": await ask(client, "plan", texts=shop(), service="shop/web", **SHOP),
            "query": await ask(
                client, "query", texts=[*shop(), rules], question="who reaches 10.244.2.20:9000?", **SHOP
            ),
            "causes": await ask(client, "causes", cause="forward-drop"),
        }
        proofs = [
            await ask(client, "check", texts=[*shop(), rules, *more], service="shop/cart", **SHOP)
            for more in ([], ["*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"])
        ]
        return tools, answers, proofs

    tools, answers, proofs = conversation(talk)
    for name, answer in answers.items():
        jsonschema.validate(answer, tools[name].output_schema)
    assert not answers["check"]["agrees"] and "10.244.2.10:8080" in answers["check"]["findings"][0]
    assert {line["service"] for line in answers["plan"]["frontends"]} == {"shop/web:http"}
    assert answers["query"]["certain"] and "10.96.0.81:9000" in answers["query"]["lines"][0]
    assert answers["causes"] == {"causes": {"forward-drop": "The FORWARD chain drops it"}}
    # Without the table raw, a rule there might change every packet.
    assert [(each["agrees"], each["decided"]) for each in proofs] == [(False, False), (True, True)]


def test_parallel_requests_have_answers_of_their_own():
    async def talk(client):
        destinations = ("10.96.31.6:80", "10.96.31.6:81", "10.244.1.1:80")
        asked = [
            ask(client, "trace", texts=[REPORT.read_text()], source="10.244.1.9", destination=each)
            for each in destinations
        ]
        answers = await asyncio.gather(*asked)
        documents = [await ask(client, "evidence", reference=f"{each['evidence']}/packet") for each in answers]
        return list(destinations), [f"{each['destination']}:{each['port']}" for each in documents]

    asked, answered = conversation(talk)
    assert asked == answered


BAD_REQUESTS = (
    ("trace", {"texts": ["x"], "source": "a\x1b[31m", "destination": "b"}, "source has control characters"),
    ("trace", {"texts": [REPORT.read_text()], "source": "--live", "destination": "--probe"}, "there is no '--live'"),
    ("trace", {"texts": ["x"], **QUESTION}, "holds nothing that is known"),
    ("trace", {"texts": ["x"], "source": "outside"}, "missing required field `destination`"),
    ("trace", {"texts": ["x"] * 17, **QUESTION}, "$.texts"),
    ("trace", {"texts": ["x"], "output": "html", **QUESTION}, "unknown field `output`"),
    ("trace", {**QUESTION}, "pass the output of tools"),
    ("plan", {}, "in `texts`"),
    ("trace", {"live": True, **QUESTION}, "with --live"),
    ("trace", {"files": ["notes.txt"], **QUESTION}, "with --root FOLDER"),
    ("query", {"texts": [REPORT.read_text()], "question": "--help"}, "--help"),
    ("plan", {"texts": ["kind: ["]}, "rules"),
    ("causes", {"cause": "no-such-cause"}, "there is no cause"),
    ("remove", {}, "there is no tool 'remove'"),
    ("evidence", {"reference": "file:///etc/passwd"}, "no reference"),
    ("evidence", {"reference": "narthex://evidence/99"}, "not kept"),
)


def test_bad_requests_are_errors_that_say_what_is_wrong():
    async def talk(client):
        failed = [await ask(client, name, **arguments) for name, arguments, _ in BAD_REQUESTS]
        # The server goes on.
        return failed, await ask(client, "causes", cause="mtu")

    failed, after = conversation(talk)
    for (name, _, said), text in zip(BAD_REQUESTS, failed, strict=True):
        assert isinstance(text, str) and said in text, (name, text)
        assert "Traceback" not in text
    assert "mtu" in after["causes"]


def test_files_stay_below_the_root(tmp_path):
    root, secret = tmp_path / "allowed", tmp_path / "secret.txt"
    root.mkdir()
    secret.write_text("secret")
    (root / "report.md").write_text(REPORT.read_text())
    (root / "link.txt").symlink_to(secret)

    async def talk(client):
        outside = [
            await ask(client, "trace", files=[name], **QUESTION) for name in ("../secret.txt", str(secret), "link.txt")
        ]
        missing = await ask(client, "trace", files=["none.txt"], **QUESTION)
        return outside, missing, await ask(client, "trace", files=["report.md"], **QUESTION)

    outside, missing, found = conversation(talk, "--root", root)
    assert all("is outside of the folder" in each for each in outside)
    assert "does not exist" in missing
    assert found["causes"][0]["cause"] == "forward-drop"
