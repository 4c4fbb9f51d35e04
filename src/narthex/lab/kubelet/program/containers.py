"""Start of a container: as a program of this machine, or by the echo server."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from narthex.lab.cluster import DNS_PORT
from narthex.lab.containers.container import Containers, ContainerStartError, RunningContainer
from narthex.lab.containers.program import DEFAULT_CAPABILITIES, ProgramSpec, find_program
from narthex.lab.kubelet.environment import ContainerConfigError, command_line, environment, hostname
from narthex.lab.kubelet.probes import ProbeState, probes_of
from narthex.lab.kubelet.program.console import Console
from narthex.lab.kubelet.program.echo import EchoServer
from narthex.lab.kubelet.program.endpoint_drain import EndpointDrain
from narthex.lab.kubelet.program.event_recorder import EventRecorder
from narthex.lab.kubelet.program.images import ContainerImage, Images
from narthex.lab.kubelet.program.prober import Prober
from narthex.lab.kubelet.program.volumes import PodFiles
from narthex.lab.kubelet.status import ContainerFacts
from narthex.lab.program.network import PodNetwork
from narthex.lab.program.shared_registry import SharedRegistry

Object = Mapping[str, Any]


class PodDependencies(NamedTuple):
    """Services that pods use."""

    registry: SharedRegistry
    network: PodNetwork
    files: PodFiles
    images: Images
    echo: EchoServer
    containers: Containers
    record_event: EventRecorder
    is_released: EndpointDrain
    prober: Prober


class ContainerRun:
    """One run of a container."""

    def __init__(
        self, facts: ContainerFacts, container: RunningContainer | None, spec: Object, environment: dict[str, str]
    ) -> None:
        self.facts = facts
        self.container = container
        """None: the echo server replaces the program."""
        self.console: Console | None = None
        """Only for a container with `stdin` or `tty`."""
        self.environment = environment
        self.began = time.monotonic()
        self.probes = ProbeState(probes_of(spec), datetime.now(UTC))
        self.next_check: datetime | None = None
        """The time for which the next evaluation of probes is scheduled."""
        self.failed = False
        """It is being terminated because of a probe or its postStart hook."""
        self.starting = False
        """Its postStart hook runs."""
        self.kill_at = 0.0
        """Time of SIGKILL by `time.monotonic`; 0: nothing stops it. The rest belongs to `Stopping`."""
        self.delayed = False
        """SIGTERM follows a hook, or other containers."""
        self.waits_for_turn = False
        self.signaled = False
        """It was sent SIGTERM, or its echo server drains."""


def echo_name(pod: Object, container: str) -> str:
    """Return the echo server's name for a container."""
    return f"{pod['metadata']['uid']}/{container}"


def start_echo(pod: Object, spec: Object, facts: ContainerFacts, deps: PodDependencies) -> ContainerRun:
    """Let the echo server replace a container's program. Raises OSError."""
    declared = ((str(port.get("protocol") or "TCP"), int(port["containerPort"])) for port in spec.get("ports") or ())
    ports = dict.fromkeys(declared)
    node = pod["spec"]["nodeName"]
    if pod["spec"].get("hostNetwork") and any(number == DNS_PORT for _, number in ports):
        raise OSError(errno.EADDRINUSE, f"Address already in use: port {DNS_PORT} of {node} is the lab's DNS's")
    says = f"{pod['metadata']['name']} on {node}"
    deps.echo.add(echo_name(pod, spec["name"]), says, deps.network.namespace(pod), ports)
    return ContainerRun(facts, None, spec, {})


ProgramEnded = Callable[[RunningContainer], None]
"""Called in another thread."""


def start_program(
    pod: Object,
    spec: Object,
    facts: ContainerFacts,
    image: ContainerImage,
    deps: PodDependencies,
    ended: ProgramEnded,
    processes: int = 0,
) -> ContainerRun:
    """Start a container's program. Raises ContainerConfigError, ContainerStartError, or OSError.

    `processes` is the process that holds the pod's PID namespace; 0: the container has its own.
    """
    given = environment_of(pod, spec, deps.registry)
    named = {each["name"] for each in spec.get("env") or ()}
    known = {**given, **{name: value for name, value in image.environment.items() if name not in named}}
    argv = command_line(spec, image.entry_point, image.arguments, known)
    directory = spec.get("workingDir") or image.directory or "/"
    if not argv:
        raise ContainerConfigError("no command specified")
    try:
        # A program of the image is found once the container's root is there.
        executable = "" if image.own_root else find_program(argv[0], known, directory)
    except OSError as error:
        raise ContainerStartError(str(error.strerror), missing=True) from error
    security = _security_of(pod, spec)
    program = msgspec.structs.replace(
        program_in_pod(pod, spec, deps, argv, executable, known),
        layer=image.layer,
        process_namespace=processes,
        directory=directory,
        user=security.get("runAsUser"),
        group=security.get("runAsGroup"),
        tty=bool(spec.get("tty")),
    )
    log = deps.files.log(pod, spec["name"], facts.restarts)
    if not (spec.get("stdin") or spec.get("tty")):
        program = msgspec.structs.replace(program, log=str(log))
        return ContainerRun(facts, deps.containers.run(program, ended=ended), spec, known)
    stdin, once, tty = (bool(spec.get(field)) for field in ("stdin", "stdinOnce", "tty"))
    console = Console(log, stdin=stdin, once=once, tty=tty)
    try:
        run = ContainerRun(facts, deps.containers.run(program, console.files, ended), spec, known)
    except BaseException:
        console.discard()
        raise
    console.start()
    run.console = console
    return run


def program_in_pod(
    pod: Object, spec: Object, deps: PodDependencies, argv: Sequence[str], executable: str, known: dict[str, str]
) -> ProgramSpec:
    """Return a program with the namespaces and mounts of a container. Raises ContainerConfigError."""
    return ProgramSpec(
        argv=tuple(argv),
        executable=executable,
        environment=known,
        network_namespace=deps.network.namespace(pod),
        cgroup=deps.network.cgroup(pod),
        hostname=hostname(pod),
        shows=(*deps.images.find(spec).files, *deps.files.mounts(pod, spec)),
        capabilities=_capabilities(_security_of(pod, spec)),
    )


def _security_of(pod: Object, spec: Object) -> dict[str, Any]:
    return {**(pod["spec"].get("securityContext") or {}), **(spec.get("securityContext") or {})}


_ADDABLE = frozenset({*DEFAULT_CAPABILITIES, "IPC_LOCK", "NET_ADMIN", "NET_BROADCAST"})
"""What a manifest may add: capabilities that affect only the pod's own namespaces. `privileged` adds all of them, and no others."""


def _capabilities(security: Object) -> tuple[str, ...]:
    return capabilities_of({"add": ["ALL"]} if security.get("privileged") else security.get("capabilities") or {})


def capabilities_of(requested: Object) -> tuple[str, ...]:
    """Return the capabilities of a container for its `securityContext.capabilities`: `drop` first, then `add`."""
    add, drop = (
        {str(name).upper().removeprefix("CAP_") for name in requested.get(field) or ()} for field in ("add", "drop")
    )
    kept = set() if "ALL" in drop else {*DEFAULT_CAPABILITIES} - drop
    return tuple(sorted(kept | (_ADDABLE if "ALL" in add else add & _ADDABLE)))


def environment_of(pod: Object, spec: Object, shared: SharedRegistry) -> dict[str, str]:
    """Return the variables of a container. Safe from any thread. Raises ContainerConfigError."""
    home = pod["metadata"]["namespace"]
    with shared.held() as registry:
        services = [*registry.list("Service", "default"), *registry.list("Service", home)]
        return environment(pod, spec, services, lambda kind, name: registry.get(kind, home, name))
