"""The program that a container runtime starts for each plugin. `narthex cni install` puts it in place, compiled (`start.py`
runs that).

It lives for milliseconds, so it loads nothing that is not in C (`os` alone would be a fifth of its time): it hands the request to the resident agent and prints
the answer. Where no agent answers, it loads the plugins and does the work itself. The name it is started by says which
plugin it is.
"""

import _socket
import gc
import posix
import sys

SOCKET = "/run/narthex/cni.sock"
STATE = "/var/lib/cni/narthex"
PATHS: list[str] = []
"""Where the plugins' modules are, for when there is no agent."""
BUNDLE = ""
"""The file with the modules' code in one piece: to look for thirty files takes longer than to load them. These four lines are
written anew by the installation."""

PATIENCE_SECONDS = 120.0
_MOST_STDIN = (1 << 20) + 1
_WANTED = ("CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH")


def main() -> int:
    """Answer one call; the exit status."""
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
    """Let modules be loaded out of the bundle. Without one, or with that of another Python, they come from their files."""
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
            if name not in modules:
                return None
            folder = modules[name][0]
            spec = _frozen_importlib.ModuleSpec(name, Bundle, is_package=folder is not None)  # type: ignore[arg-type]
            if folder is not None:
                # What is not in the bundle is beside it in files.
                spec.submodule_search_locations = [folder]
            return spec

        @staticmethod
        def create_module(spec: object) -> None:  # noqa: ARG004 - the usual one will do
            return None

        @staticmethod
        def exec_module(module: object) -> None:
            exec(marshal.loads(modules[module.__name__][1]), module.__dict__)  # type: ignore[attr-defined]

    sys.meta_path.insert(0, Bundle)  # type: ignore[arg-type]


def _ask(plugin: str, environment: dict[str, str], stdin: bytes) -> "tuple[int, bytes] | None":
    """What the agent answers; None when there is none for this network namespace.

    The request goes with open files of this namespace and, for what concerns a pod, of the pod's.
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
    """The agent had the request and went away: nobody knows how far it came.

    A second ADD would be refused where the first came far enough, so the runtime has to DEL; all else can be done again.
    """
    if environment.get("CNI_COMMAND") != "ADD":
        return None
    plain = "".join(character for character in why if character not in '"\\' and character.isprintable())
    return 1, f'{{"code":11,"msg":"the agent went away: {plain}","details":"DEL, then try again"}}'.encode()


if __name__ == "__main__":
    # What lives for milliseconds leaves no garbage, and tidying up at the end takes as long as the work.
    gc.disable()
    posix._exit(main())
