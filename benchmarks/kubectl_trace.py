"""`kubectl narthex trace` from a pod to a broken Service in a lab, beside the calls of kubectl that it makes.

    sudo python benchmarks/kubectl_trace.py [--quick]

The floor is `kubectl get` of the objects and then `kubectl exec` of an empty command in the pod of the node, with nothing else. Bar: the cause is printed
within 3 s. A machine that does other things at the same time blurs it.
Needs root and kubectl. Works in a lab of its own and removes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from frame.report import Report, Row, parser
from narthex.lab.program.state import StateDirectory
from narthex.linux.run import with_package

NAME = f"nck{os.getpid()}"
SECONDS = 3.0
TRACE = [sys.executable, "-c", "from narthex.cli.kubectl import main; main()", "trace", "client", "broken", "--yes"]
FLOOR = (
    ["kubectl", "get", "services,endpointslices,nodes,pods", "-A", "-o", "json"],
    ["kubectl", "exec", "-n", "kube-system", "kube-proxy-node-1", "--", "true"],
)


def run(*argv: str, environment: dict[str, str] | None = None) -> str:
    """Run a program and return its output."""
    done = subprocess.run(argv, env=environment or with_package(os.environ), check=True, capture_output=True, text=True)
    return done.stdout


def lab(*words: str) -> None:
    """Run a command of the lab."""
    run(sys.executable, "-m", "narthex", "lab", *words, "--name", NAME)


def timed(commands: tuple[list[str], ...], environment: dict[str, str]) -> tuple[float, str]:
    """Return the seconds that commands take, one after the other, and what the last one printed."""
    begin = time.perf_counter()
    said = ""
    for argv in commands:
        said = run(*argv, environment=environment)
    return time.perf_counter() - begin, said


def main() -> int:
    """Measure both, taking turns."""
    asked = parser(__doc__).parse_args()
    report = Report("kubectl_trace", asked)
    environment = {**with_package(os.environ), "KUBECONFIG": str(StateDirectory(NAME).kubeconfig)}
    try:
        lab("up", "--nodes", "2")
        run("kubectl", "create", "service", "clusterip", "broken", "--tcp=80:8080", environment=environment)
        run("kubectl", "run", "client", "--image=client", "--restart=Never", environment=environment)
        run("kubectl", "wait", "--for=condition=Ready", "pod/client", "--timeout=60s", environment=environment)
        bare, full = [], []
        for _ in range(3 if asked.quick else 10):
            bare.append(timed(FLOOR, environment)[0])
            seconds, said = timed((TRACE,), environment)
            full.append(seconds)
            if "has no endpoints" not in said:
                raise SystemExit("the cause is not named")
    finally:
        lab("down")
    table = report.table("the cause of a broken Service", unit="s", floor="kubectl get and kubectl exec alone")
    least: Row = table.row("kubectl alone", bare)
    table.row("kubectl narthex trace", full, floor=least, most=SECONDS)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
