"""Every document that a command prints with `-o json` fits the published schema, and so do the examples in the docs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from narthex.cli import main
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program.agent_server import TOOLS, tool
from narthex.trace.program.bundle import write_file

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "reference" / "schemas" / "narthex.v1.json"
SCHEMA = json.loads(FILE.read_text())
_TOP = [SCHEMA["$defs"][each["$ref"].rpartition("/")[2]] for each in SCHEMA["anyOf"]]
DEFINITIONS = {each["properties"]["kind"]["enum"][0]: each for each in _TOP}
PAGES = ("README.md", "docs/reference/json.md")

OBJECTS = """
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: node-1}, spec: {podCIDRs: [10.244.1.0/24]},
   status: {addresses: [{type: InternalIP, address: 192.0.2.11}]}}
- apiVersion: v1
  kind: Service
  metadata: {name: web, namespace: shop}
  spec:
    type: LoadBalancer
    clusterIP: 10.96.0.7
    sessionAffinity: ClientIP
    loadBalancerSourceRanges: [198.51.100.0/24]
    ports: [{name: http, port: 80, targetPort: 8080, nodePort: 30001}, {name: s, protocol: SCTP, port: 90, nodePort: 30002}]
  status: {loadBalancer: {ingress: [{ip: 203.0.113.7}]}}
- {apiVersion: v1, kind: Service, metadata: {name: none, namespace: shop}, spec: {clusterIP: 10.96.0.8, ports: [{port: 80}]}}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
  addressType: IPv4
  ports: [{name: http, port: 8080}, {name: s, port: 9090, protocol: SCTP}]
  endpoints:
  - {addresses: [10.244.1.5], nodeName: node-1, targetRef: {kind: Pod, name: web-x1}}
  - {addresses: [10.244.2.7], nodeName: node-2, targetRef: {kind: Pod, name: web-x2}}
- {apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: pool, namespace: metallb-system},
   spec: {addresses: [203.0.113.0/28]}}
- {apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: all, namespace: metallb-system}}
"""


@pytest.fixture
def words(tmp_path: Path) -> dict[str, list[str]]:
    """A command line for each kind of document; `{text}` is replaced."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "all.yaml").write_text(OBJECTS)
    objects = ["--manifests", str(tmp_path / "objects"), "--cluster-cidr", "10.244.0.0/16"]
    modes = {
        mode: CliRunner().invoke(main, ["render", *objects, "--node", "node-1", "--mode", mode]).stdout
        for mode in ("iptables", "nftables")
    }
    for name, rules in modes.items():
        path = "rules/iptables-nft.txt" if name == "iptables" else "rules/nft.txt"
        write_file(tmp_path / f"{name}.tgz", BundleManifest(node="node-1", writer="test"), {path: rules})
    old, new = (str(tmp_path / f"{name}.tgz") for name in modes)
    return {
        "trace": ["outside", "192.0.2.11:30001", *objects, "--node", "node-1"],
        "trace of a bundle": ["trace", "outside", "192.0.2.11:30001", "--bundle", old],
        "trace to nothing": ["trace", "10.244.1.5", "shop/none", *objects, "--node", "node-1"],
        "check": [*objects, "--bundle", old],
        "proof": ["check", "--prove", *objects, "--bundle", old],
        "changes": ["diff", "--prove", old, new, "--node-ip", "192.0.2.11"],
        "changes of modes": [
            "migrate",
            "--prove",
            "--from",
            "iptables",
            "--to",
            "nftables",
            *objects,
            "--node",
            "node-1",
        ],
        "query": ["what can pods reach?", *objects, "--bundle", old],
        "diff": [old, new],
        "diff of modes": ["diff", "iptables", "ipvs", *objects, "--node", "node-1"],
        "top": ["--bundle", old],
        "migrate": ["--from", "iptables", "--to", "ipvs", *objects, "--node", "node-1"],
        "plan": [*objects, "--node", "node-1"],
        "lb-why": ["lb", "why", "shop/web", "--manifests", str(tmp_path / "objects")],
        "bundle": ["--dry-run"],
        "render": [*objects, "--node", "node-1"],
        "cni-install": ["cni", "install", "--bin-dir", str(tmp_path / "bin")],
        "cni-uninstall": ["cni", "uninstall", "--bin-dir", str(tmp_path / "bin")],
        "cni-gc": ["cni", "gc", "--dry-run", "--state-dir", str(tmp_path / "state"), "--data-dir", str(tmp_path)],
    }


def wrong(document: dict[str, object]) -> list[str]:
    """What is wrong with a document by the definition of its kind."""
    validator = Draft202012Validator({**DEFINITIONS[document["kind"]], "$defs": SCHEMA["$defs"]})
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize(
    "name",
    ["trace", "trace of a bundle", "trace to nothing", "check", "proof", "changes", "changes of modes", "query", "diff", "diff of modes", "top", "migrate", "plan", "lb-why",
     "bundle", "render", "cni-gc", "cni-install", "cni-uninstall"],
)  # fmt: skip
def test_what_commands_print_fits(words: dict[str, list[str]], name: str) -> None:
    kind = name.partition(" ")[0]
    argv = words[name] if words[name][0] in ("trace", "check", "diff", "migrate", "lb", "cni") else [kind, *words[name]]
    done = CliRunner().invoke(main, [*argv, "-o", "json"])
    document = json.loads(done.stdout)
    assert (document["kind"], document["version"]) == (kind, 1), done.output
    assert wrong(document) == []
    # The schema is no empty one: no field may be missing.
    for field in document:
        assert (
            wrong({key: value for key, value in document.items() if key != field} | {"kind": kind}) or field == "kind"
        )


def test_the_schema_is_up_to_date() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "schemas.py"), "-"], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    tools = json.loads(FILE.with_name("agent-tools.v1.json").read_text())["tools"]
    assert FILE.read_text() == done.stdout, "run `python scripts/schemas.py`"
    served = {name: tool(name) for name in TOOLS}
    schemas = {name: {"request": each.input_schema, "answer": each.output_schema} for name, each in served.items()}
    described = {name: {"description": each.description} for name, each in served.items()}
    assert tools == {name: described[name] | json.loads(json.dumps(schemas[name])) for name in TOOLS}


@pytest.mark.parametrize("page", PAGES)
def test_examples_fit(page: str) -> None:
    examples = re.findall(r"^```json\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert examples or page == "README.md"
    for example in examples:
        assert wrong(json.loads(example)) == []


def test_each_kind_is_documented_with_an_example() -> None:
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    assert {kind for kind in DEFINITIONS if f'"kind": "{kind}"' not in text} == set()
