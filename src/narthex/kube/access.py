"""Where the API server is and which credentials to use: kubeconfig, `--master`, or the service account of a pod.

lightkube reads these and builds the HTTP client; it takes a third of a second to import, so it is imported at the
first use. This module adds what lightkube leaves out: `proxy-url`, `tls-server-name`, and exec plugins of v1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex import __version__
from narthex.model import quoted
from narthex.runtime.configuration.values import ClientConnection

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Timeout
    from lightkube.config.kubeconfig import SingleConfig

CONNECT_SECONDS = 10.0
_MAX_BYTES = 4 << 20
"""Largest kubeconfig. One with certificates of a hundred clusters has a megabyte."""
_EXEC = "client.authentication.k8s.io"


class AccessError(ValueError):
    """The configured server or credentials cannot be used; the message states the reason."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The configured server and credentials, before any file is read."""

    connection: ClientConnection = ClientConnection()
    """Only `kubeconfig`, `qps`, and `burst` have an effect; the content type is always JSON."""
    master: str = ""
    """URL of the server; it overrides the kubeconfig's (`--master`)."""

    @property
    def origin(self) -> str:
        """Return the source of the configuration, for messages."""
        return self.connection.kubeconfig or self.master or "the service account of this pod"


def access_to(kubeconfig: str, master: str = "", *, qps: float = 5.0, burst: int = 10) -> Access:
    """Return the access that a command's options name; empty ones name the service account of the pod."""
    return Access(connection=ClientConnection(kubeconfig=kubeconfig, qps=qps, burst=burst), master=master)


class ServerConnection(msgspec.Struct, frozen=True):
    """An HTTP client and the files it was built from."""

    client: AsyncClient
    server: str
    extensions: dict[str, Any]
    """Passed with each request."""
    files: tuple[Path, ...]
    """A change of one of these files requires a new client."""


def open_connection(access: Access) -> ServerConnection:
    """Return a client for the server, to be closed by the caller. Raises AccessError."""
    try:
        return _open(access)
    except AccessError:
        raise
    except Exception as error:
        # Files of any content, TLS material of any kind: lightkube, and ssl raise what they like.
        text = str(error) if not isinstance(error, KeyError) else f"{error} is missing"
        raise AccessError(f"{access.origin}: {text or type(error).__name__}") from error


def _open(access: Access) -> ServerConnection:
    from urllib.request import getproxies

    import httpx2
    from lightkube.config.client_adapter import ConnectionParams
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User

    raw: dict[str, Any] = {}
    path = access.connection.kubeconfig
    if path:
        file = Path(path).expanduser()
        raw = read_kubeconfig(file)
        config = KubeConfig.from_dict(raw, fname=file).get()
    elif access.master:
        config = KubeConfig.from_server(access.master).get()
    else:
        config = _of_the_pod().get()
    assert config is not None  # lightkube raises when there is no current context.
    config = config._replace(user=config.user or User())
    if access.master:
        config = config._replace(cluster=msgspec.structs.replace(config.cluster, server=access.master))
    written = (each.get("cluster") for each in raw.get("clusters", ()) if each.get("name") == config.context.cluster)
    cluster: dict[str, Any] = next(written, {}) or {}
    config = _with_exec(config, raw)
    # How long silence is borne is the business of the watch protocol.
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS, write=CONNECT_SECONDS)
    proxies = getproxies()
    if cluster.get("proxy-url") or any(proxies.get(scheme) for scheme in ("http", "https", "all")):
        # httpx2 must then select the transport.
        fields = ConnectionParams(timeout=timeout, proxy=cluster.get("proxy-url") or None).httpx_params(config)
    else:
        fields = _direct(config, timeout)
    user = config.user
    if user is not None and user.exec and not (user.token or user.token_file):
        from narthex.kube.exec_plugin import exec_auth

        fields["auth"] = exec_auth(user.exec)
    client = httpx2.AsyncClient(**fields, headers={"User-Agent": f"narthex/{__version__}"})
    name = cluster.get("tls-server-name")
    return ServerConnection(client, config.cluster.server, {"sni_hostname": name} if name else {}, _files(path, config))


def _direct(config: SingleConfig, timeout: Timeout) -> dict[str, Any]:
    """Return the arguments of a client that uses our own transport."""
    from lightkube.config.client_adapter import ConnectionParams, user_auth

    from narthex.kube.transport import ApiTransport

    server = config.cluster.server
    if server.startswith("http://"):
        # Without TLS: reading all roots of trust for nothing takes as long as two thousand objects.
        return {"base_url": server, "auth": user_auth(config.user), "timeout": timeout, "transport": ApiTransport(None)}
    fields: dict[str, Any] = ConnectionParams(timeout=timeout).httpx_params(config)
    return fields | {"transport": ApiTransport(fields["verify"])}


def read_kubeconfig(file: Path) -> dict[str, Any]:
    """Return the content of a kubeconfig. Raises AccessError if it cannot be read, or is no kubeconfig."""
    from narthex.model.documents import MalformedDocument, read_documents

    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise AccessError(f"{file}: larger than {_MAX_BYTES >> 20} MiB; give a kubeconfig's path with --kubeconfig")
        found = next(read_documents(data.decode("utf-8-sig"), allow_duplicate_keys=True), None)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise AccessError(f"{file}: {why}; give the kubeconfig's path with --kubeconfig") from error
    if isinstance(found, MalformedDocument):
        raise AccessError(f"{file}:{found.line}: {found.message}")
    raw = found.value if found is not None else None
    if not isinstance(raw, dict) or not isinstance(raw.get("clusters"), list):
        raise AccessError(f"{file} is not a kubeconfig: it has no list of clusters")
    # Written empty lists are null now and then.
    return raw | {name: raw.get(name) or [] for name in ("contexts", "users")}


def _of_the_pod() -> Any:
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    try:
        return KubeConfig.from_service_account()
    except (ConfigError, KeyError) as error:
        raise AccessError(
            f"this is not a pod with a service account ({error}): give --kubeconfig or --master"
        ) from error


def _with_exec(config: SingleConfig, raw: dict[str, Any]) -> SingleConfig:
    """Set the protocol version for an exec plugin and resolve its path relative to the kubeconfig."""
    from lightkube.config.models import NameValue

    user = config.user
    plugin = user.exec if user is not None else None
    if user is None or plugin is None:
        return config
    if plugin.apiVersion not in (f"{_EXEC}/v1", f"{_EXEC}/v1beta1"):
        raise AccessError(
            f"{config.fname}: exec.apiVersion {quoted(plugin.apiVersion)} is not {_EXEC}/v1 or {_EXEC}/v1beta1"
        )
    spec: dict[str, Any] = {"interactive": False}
    entry = next(each["user"]["exec"] for each in raw["users"] if each.get("name") == config.context.user)
    if entry.get("provideClusterInfo"):
        spec["cluster"] = {"server": config.cluster.server}
        if config.cluster.certificate_auth_data:
            spec["cluster"]["certificate-authority-data"] = config.cluster.certificate_auth_data
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": spec}
    command = plugin.command if "/" not in plugin.command else str(config.abs_file(plugin.command))
    exec_user = msgspec.structs.replace(
        plugin,
        # lightkube knows v1beta1; what is read of the plugin's answer is the same in v1.
        apiVersion=f"{_EXEC}/v1beta1",
        command=command,
        env=[*(plugin.env or []), NameValue("KUBERNETES_EXEC_INFO", msgspec.json.encode(info).decode())],
    )
    return config._replace(user=msgspec.structs.replace(user, exec=exec_user))


def _files(kubeconfig: str, config: SingleConfig) -> tuple[Path, ...]:
    user = config.user
    given = [config.cluster.certificate_auth, *((user.client_cert, user.client_key) if user else ())]
    files = [Path(config.abs_file(file)) for file in given if file]
    return (*([Path(kubeconfig).expanduser()] if kubeconfig else []), *files)
