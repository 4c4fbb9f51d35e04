"""The program that a container runtime starts for each plugin. `narthex cni install` installs it compiled (`start.py` runs it).

It runs for milliseconds, so it imports only C modules (`os` alone would be a fifth of its run time). It passes the request
to the resident agent and prints the response. Without an agent it loads the plugins and does the work itself. The name it
is started by selects the plugin.
"""

import _socket
import gc
import posix
import sys

SOCKET = "/run/narthex/cni.sock"
STATE = "/var/lib/cni/narthex"
PATHS: list[str] = []
"""Directories of the plugins' modules, for use without an agent."""
BUNDLE = ""
"""File with the code of all modules: searching for thirty files takes longer than loading them. The installation replaces
the values of SOCKET, STATE, PATHS, and BUNDLE.
"""

PATIENCE_SECONDS = 120.0
_MOST_STDIN = (1 << 20) + 1
_WANTED = ("CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH")


def main() -> int:
    """Answer one invocation; return the exit status."""
    plugin = sys.argv[0].rpartition("/")[2]
    held = {name.decode("ascii", "replace"): value for name, value in posix.environ.items()}
    environment = {name: held[name].decode("utf-8", "surrogateescape") for name in _WANTED if name in held}
    stdin = b""
    if environment.get("CNI_COMMAND") != "VERSION":
        while len(stdin) < _MOST_STDIN and (some := posix.read(0, 1 << 16)):
            stdin += some
    said = _ask(plugin, environment, stdin)
    if said is None:
        sys.path += PATHS
        _take_bundle()
        from narthex.cni.program.run import answer

        text, status = answer(plugin, environment, stdin, STATE)
        said = status, text.encode()
    if said[1]:
        posix.write(1, said[1] + b"\n")
    return said[0]


def _take_bundle() -> None:
    """Import modules from the bundle. Without one, or with that of another Python version, they are imported from their files."""
    import _frozen_importlib
    import marshal
    from _frozen_importlib_external import MAGIC_NUMBER

    try:
        descriptor = posix.open(BUNDLE, posix.O_RDONLY)
        try:
            data = posix.read(descriptor, posix.fstat(descriptor).st_size)
        finally:
            posix.close(descriptor)
        if data[: len(MAGIC_NUMBER)] != MAGIC_NUMBER:
            return
        modules = marshal.loads(data[len(MAGIC_NUMBER) :])
    except (OSError, ValueError, EOFError, TypeError):
        return

    class Bundle:
        """Finder and loader of what is in it."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:  # noqa: ARG004 - given by import
            """Return the spec of a bundled module."""
            if name not in modules:
                return None
            folder = modules[name][0]
            spec = _frozen_importlib.ModuleSpec(name, Bundle, is_package=folder is not None)  # type: ignore[arg-type]
            if folder is not None:
                # Modules that are not in the bundle are imported from files.
                spec.submodule_search_locations = [folder]
            return spec

        @staticmethod
        def create_module(spec: object) -> None:  # noqa: ARG004 - the usual one will do
            """Use the default module creation."""
            return

        @staticmethod
        def exec_module(module: object) -> None:
            """Run the module's code."""
            exec(marshal.loads(modules[module.__name__][1]), module.__dict__)  # type: ignore[attr-defined]

    sys.meta_path.insert(0, Bundle)  # type: ignore[arg-type]


def _ask(plugin: str, environment: dict[str, str], stdin: bytes) -> "tuple[int, bytes] | None":
    """Return the agent's response; None if there is no agent for this network namespace.

    The request is sent with open files of this namespace and, if a pod is concerned, of the pod's.
    """
    agent = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    agent.settimeout(PATIENCE_SECONDS)
    files: list[int] = []
    try:
        try:
            agent.connect(SOCKET)
            files.append(posix.open("/proc/self/ns/net", posix.O_RDONLY))
            if environment.get("CNI_NETNS"):
                files.append(posix.open(environment["CNI_NETNS"], posix.O_RDONLY | posix.O_NONBLOCK))
        except (OSError, ValueError):
            if not files:
                return None
        parts = [plugin.encode(), stdin]
        for name, value in environment.items():
            parts += [name.encode(), value.encode("utf-8", "surrogateescape")]
        body = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        descriptors = b"".join(one.to_bytes(4, sys.byteorder) for one in files)
        body = len(body).to_bytes(4, "big") + body
        sent = agent.sendmsg([body], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
        if sent < len(body):
            agent.sendall(body[sent:])
        said = b""
        while some := agent.recv(1 << 16):
            said += some
    except OSError as error:
        return _lost(environment, str(error))
    finally:
        for one in files:
            posix.close(one)
        agent.close()
    if not said:
        return _lost(environment, "it closed the connection")
    return None if said[0] == 255 else (said[0], said[1:])


def _lost(environment: dict[str, str], why: str) -> "tuple[int, bytes] | None":
    """Handle an agent that disappeared during the request; its progress is unknown.

    A repeated ADD might be rejected as a duplicate, so the runtime must DEL first; other commands can be repeated here.
    """
    if environment.get("CNI_COMMAND") != "ADD":
        return None
    plain = "".join(character for character in why if character not in '"\\' and character.isprintable())
    return 1, f'{{"code":11,"msg":"the agent disconnected: {plain}","details":"DEL, then try again"}}'.encode()


if __name__ == "__main__":
    # Garbage collection and interpreter shutdown would take as long as the work.
    gc.disable()
    posix._exit(main())
