"""`make cluster`: build the image, start a cluster, install Narthex from `deploy/`, and try it.

python -m tests.cluster --control-plane DIR --kubelet PATH [--kube-proxy PATH] [--e2e PATH --agnhost PATH] ...
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from tests.cluster import workloads
from tests.cluster.cluster import Cluster, running
from tests.cluster.conformance import ChosenSuite, run_conformance
from tests.cluster.families import INDEXES, IPV4
from tests.cluster.images import NARTHEX, ImageBuilder
from tests.cluster.installation import BACKENDS, COMPONENTS, IMAGE, ROOT, SOCKETS, Installation
from tests.cluster.operations import OPERATIONS, Trial
from tests.cluster.programs import ClusterPrograms, missing
from tests.cluster.smoke import Smoke

from narthex.lab.conformance import CaseResult
from narthex.lab.program.state import LabError
from narthex.linux.run import CommandError

_FILE = click.Path(path_type=Path, exists=False)
TAG = NARTHEX.rpartition(":")[2]
NEXT = f"{TAG}-next"
STEPS = ("smoke", "operations", "conformance")


@click.command()
@click.option(
    "--control-plane", type=_FILE, required=True, help="Directory of etcd and the programs of a control plane."
)
@click.option("--kubelet", type=_FILE, required=True)
@click.option(
    "--containerd", type=_FILE, help="Directory of containerd, ctr, and containerd-shim-runc-v2. Default: Debian's."
)
@click.option("--kube-proxy", type=_FILE, help="For the switch from kube-proxy and back.")
@click.option("--e2e", type=_FILE, help="Kubernetes' e2e.test.")
@click.option("--agnhost", type=_FILE, help="The program of the suite's image.")
@click.option("--image", type=_FILE, help="An archive of the image. Default: built from deploy/Containerfile.")
@click.option("--next-image", type=_FILE, help="An archive of another build, for the upgrade. Default: the same one.")
@click.option("--build-option", multiple=True, help="An option of `podman build`.")
@click.option("--name", default="trial", show_default=True)
@click.option("--nodes", default=3, show_default=True)
@click.option("--rate", default=60.0, show_default=True, help="Requests per second of the client on each node.")
@click.option("--step", "steps", multiple=True, type=click.Choice(STEPS), help="Run these steps only.")
@click.option(
    "--operation", "chosen", multiple=True, type=click.Choice(list(OPERATIONS)), help="Run these operations only."
)
@click.option(
    "--focus", default="", help="Regular expression of the suite's tests. Default: [sig-network] Conformance."
)
@click.option(
    "--skip", default="", help="Regular expression of tests to leave out. Default with --focus: those of features."
)
@click.option("--junit", type=_FILE, help="Write the suite's results with the output of failed tests.")
@click.option("--mode", default="nftables", show_default=True)
@click.option("--overlay", type=click.Choice(BACKENDS), default=BACKENDS[0], show_default=True)
@click.option("--socket-load-balancing", is_flag=True, help="Install the component for it, and switch it on.")
@click.option("--families", type=click.Choice(list(INDEXES)), default=IPV4, show_default=True)
@click.option(
    "--other-host-names",
    is_flag=True,
    help="Host names that are not the nodes' names; some of the suite's tests take them for the same.",
)
@click.option("--json", "report", type=_FILE, help="Write the results.")
def main(
    image: Path | None,
    next_image: Path | None,
    build_option: tuple[str, ...],
    name: str,
    nodes: int,
    rate: float,
    steps: tuple[str, ...],
    chosen: tuple[str, ...],
    focus: str,
    skip: str,
    junit: Path | None,
    mode: str,
    overlay: str,
    socket_load_balancing: bool,
    families: str,
    other_host_names: bool,
    report: Path | None,
    **paths: Path | None,
) -> None:
    """Run a cluster on this machine, and report what fails."""
    programs = ClusterPrograms(**paths)  # type: ignore[arg-type]
    if lacks := missing(programs):
        raise click.ClickException(
            "\n".join(["programs are missing:", *(f"  {each}: {what}" for each, what in lacks.items())])
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Results()
    try:
        with running(name, programs, nodes, _say, families, other_host_names=other_host_names) as cluster:
            _load_images(cluster, results, image, next_image, build_option)
            installation = _install(cluster, results, mode, overlay, sockets=socket_load_balancing)
            suite = ChosenSuite(focus, skip, junit, image)
            _run(installation, results, steps or STEPS, chosen, rate, suite, build_option)
    except (LabError, CommandError, OSError) as error:
        results.add("cluster", str(error))
    finally:
        if report is not None:
            report.write_text(json.dumps(results.found, indent=2) + "\n")
    sys.exit(results.failed > 0)


class Results:
    """Results, printed as they come."""

    def __init__(self) -> None:
        self.found: list[dict[str, object]] = []
        self.failed = 0

    def add(self, name: str, problem: str = "", **figures: object) -> None:
        """Add a result; `problem` is empty for what has passed."""
        self.failed += bool(problem)
        self.found.append({"name": name, "problem": problem, **figures})
        shown = " ".join(f"{key}={value}" for key, value in figures.items())
        state = "FAILED" if problem else "skipped" if "skipped" in figures else "passed"
        _say(f"{state}  {name}  {shown}{problem and f'  {problem}'}")

    def add_case(self, case: CaseResult) -> None:
        """Add the result of a test of the suite; one that skips itself has not passed."""
        skipped = {"skipped": case.reason} if case.state == "skipped" else {}
        self.add(case.name, case.reason if case.state == "failed" else "", seconds=round(case.seconds), **skipped)

    def check(self, name: str, work: Callable[[], None]) -> None:
        """Run a check that raises LabError if it fails."""
        try:
            work()
        except Exception as error:
            self.add(name, f"{type(error).__name__}: {error}"[:2000])
        else:
            self.add(name)


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%T', time.gmtime())} {text}")


def _load_images(
    cluster: Cluster, results: Results, image: Path | None, following: Path | None, options: tuple[str, ...]
) -> None:
    for archive in cluster.write_basic_images():
        cluster.load_image(archive)
    if image is None:
        _say("the image is built")
        image = ImageBuilder(cluster.disk, options).build(f"{IMAGE}:{TAG}", ROOT / "deploy" / "Containerfile", ROOT)
    size = image.stat().st_size
    results.add("image", megabytes=round(size / 1e6, 1))
    cluster.load_image(image)
    if following is not None:
        cluster.load_image(following)
    for node in cluster.nodes:
        if following is None:
            cluster.inside(node, "ctr", "-n", "k8s.io", "images", "tag", f"{IMAGE}:{TAG}", f"{IMAGE}:{NEXT}")


def _install(cluster: Cluster, results: Results, mode: str, overlay: str, *, sockets: bool) -> Installation:
    installation = Installation(cluster, (*COMPONENTS, SOCKETS) if sockets else COMPONENTS)
    installation.configure(mode=mode)
    installation.overlay(overlay)
    if sockets:
        installation.balance_sockets()
    begun = time.monotonic()
    installation.apply()
    installation.await_ready()
    results.add("installation", seconds=round(time.monotonic() - begun))
    if sockets:
        results.check("socket load balancing", installation.check_sockets)
    return installation


def _run(
    installation: Installation,
    results: Results,
    steps: tuple[str, ...],
    chosen: tuple[str, ...],
    rate: float,
    suite: ChosenSuite,
    options: tuple[str, ...],
) -> None:
    cluster = installation.cluster
    cluster.apply(*workloads.basics(TAG, cluster.families), *workloads.pool(cluster.families))
    cluster.kubectl("-n", workloads.NAMESPACE, "rollout", "status", "deployment/web", "--timeout=120s")
    if "smoke" in steps:
        for name, check in Smoke(cluster).checks():
            results.check(name, check)
    if "operations" in steps:
        trial = Trial(cluster, installation, rate, TAG, NEXT)
        trial.start()
        for name in chosen or OPERATIONS:
            if name == "kube-proxy" and cluster.programs.kube_proxy is None:
                continue
            problem, figures = trial.run(name)
            results.add(name, problem, **figures)
        trial.stop()
    if "conformance" in steps and cluster.programs.e2e is not None and cluster.programs.agnhost is not None:
        cluster.kubectl("delete", "namespace", workloads.NAMESPACE)
        for case in run_conformance(cluster, ImageBuilder(cluster.disk, options), suite):
            results.add_case(case.result)


if __name__ == "__main__":
    main()
