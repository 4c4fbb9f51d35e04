"""Alert rules and the dashboard: their syntax, what makes each alert fire, and that each name is one of a program."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.deploy.program_metrics import exposed

from narthex.linux.run import run

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "alerts.yaml"
TESTS = Path(__file__).parent / "alerts_test.yaml"
GUIDE = ROOT / "docs" / "howto" / "deploy-to-a-cluster.md"
OF_PROMETHEUS = {"up"}
OF_EVERY_SERIES = {"job", "instance"}
"""Labels that Prometheus adds."""
WORDS = {"and", "or", "unless"}
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"\{([^}]*)\}")


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions():
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        query = variable["query"]
        if isinstance(query, dict):
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query["query"]).groups()
            yield variable["name"], f"{name}{{{label}=~''}}"


def names_and_labels(expression):
    """The names of metrics in a PromQL expression, and the labels that it uses."""
    labels = {label for part in SELECTOR.findall(expression) for label in re.findall(r"(\w+)\s*[=!]", part)}
    labels |= {label for part in GROUPING.findall(expression) for label in re.findall(r"\w+", part)}
    rest = GROUPING.sub(" ", SELECTOR.sub(" ", re.sub(r"\[[^]]*\]", " ", expression)))
    names = set(re.findall(r"(?<![\w.$])[a-zA-Z_:][\w:]*(?!\w*\s*\()", rest)) - WORDS
    return names, labels


def test_names_and_labels_of_an_expression():
    found = names_and_labels('sum by (le) (rate(a_bucket{x=~"y", z!="q"}[5m])) / on (k) b > 30 and time() > c')
    assert found == ({"a_bucket", "b", "c"}, {"le", "x", "z", "k"})


def test_alerts_and_dashboard_name_only_metrics_and_labels_that_exist():
    known = exposed()
    wrong = []
    for title, expression in expressions():
        names, labels = names_and_labels(expression)
        assert names, title
        wrong += [f"{title}: {name}" for name in names - OF_PROMETHEUS if name not in known]
        possible = OF_EVERY_SERIES.union(*(known.get(name, ()) for name in names))
        wrong += [f"{title}: label {label}" for label in labels - possible]
    assert wrong == []


def test_documented_metrics_exist():
    """The names that are written out in the reference, but those that only some configurations have."""
    known = exposed()
    some = {"narthex_stale_sockets_closed_total", "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"}
    text = "".join(
        (ROOT / "docs" / "reference" / f"{page}.md").read_text() for page in ("overlay", "load-balancer", "announcer")
    )
    written = set(re.findall(r"`((?:narthex_(?:overlay|lb|announcer)|metallb)_\w+)", text))
    assert {
        name for name in written - some if name not in known and not any(each.startswith(name) for each in known)
    } == set()
    assert len(written) > 20


def test_the_rules_are_valid():
    assert f"{len(rules())} rules found" in run(["promtool", "check", "rules", str(RULES)])


def test_each_alert_fires_and_none_does_in_a_healthy_cluster():
    run(["promtool", "test", "rules", str(TESTS)])
    healthy, broken = yaml.safe_load(TESTS.read_text())["tests"]
    fire = {name for each in broken["promql_expr_test"] for name in re.findall(r'alertname="(\w+)"', str(each))}
    assert fire == {rule["alert"] for rule in rules()}
    assert all(each["exp_samples"][0]["value"] == 0 for each in healthy["promql_expr_test"])


def test_the_scrape_configuration_fits_the_jobs(tmp_path):
    """Debian's promtool knows no discovery of Pods, so everything else is checked."""
    found = yaml.safe_load((MONITORING / "scrape.yaml").read_text())
    for each in found["scrape_configs"]:
        assert each.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["kube-system"]}}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(found))
    run(["promtool", "check", "config", str(tmp_path / "prometheus.yaml")])
    jobs = {each["job_name"] for each in found["scrape_configs"]}
    used = {job for _, expression in expressions() for job in re.findall(r'job="([^"]+)"', expression)}
    assert used and used <= jobs


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_the_guide_says_what_to_do_about_each_alert(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert re.search(rf"^\| (?:`\w+`, )*`{rule['alert']}`(?:, `\w+`)* \| .", GUIDE.read_text(), re.MULTILINE)


def test_panels_of_the_dashboard_do_not_overlap():
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for position in (panel["gridPos"],)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


ROWS = {
    "process start to first sync": "process start to first sync",
    "processor time of it": "processor time of it",
    "memory after the first sync": "resident after the first sync",
    "memory after 200 changes": "resident after 200 changes",
    "processor time for one change of endpoints, at 20 a second": "processor time, at 20 changes/s",
    "`nft -f` with the same rules: time": "nft -f with the same rules",
    "`nft -f` with the same rules: memory": "nft -f, at most",
}
"""Rows of the capacity table, and of the benchmark's tables."""


def test_the_capacity_table_has_the_figures_of_the_benchmark():
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    (block,) = re.findall(r"<!-- figures: capacity: .*?<!-- end -->", page, re.DOTALL)
    measured = {}
    for title, rows in re.findall(
        r"^[A-Z][\w ]*, ([\d,]+ Services x \d+) .*?:\n\n(.*?)\n\n", block, re.MULTILINE | re.DOTALL
    ):
        for label, value in re.findall(r"^\| ([^|]+) \| ([\d.]+) \w+ \|", rows, re.MULTILINE):
            measured.setdefault(label, {})[title] = float(value)
    for ours, theirs in ROWS.items():
        (cells,) = re.findall(rf"^\| {re.escape(ours)} \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
        shown = [float(cell.split()[0]) for cell in cells.split(" | ")]
        assert shown == pytest.approx(list(measured[theirs].values()), rel=0.05), ours
