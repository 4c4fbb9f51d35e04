"""The user's `kubectl`: it has the credentials, and it runs commands in pods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from narthex.linux.run import CommandError, TimeoutExpired, run, run_bytes
from narthex.model import InputError

_PROGRAM = "kubectl"
LISTED = ("services", "endpointslices", "nodes", "pods")


class KubectlError(InputError):
    """`kubectl` failed; the message has what it said."""


class Kubectl:
    """The user's `kubectl`, for one context."""

    def __init__(self, kubeconfig: str = "", context: str = "", namespace: str = "") -> None:
        """Take the options that the user gave; empty ones are those of the current context."""
        self.namespace = namespace
        self.words = [_PROGRAM]
        self.words += ["--kubeconfig", kubeconfig] if kubeconfig else []
        self.words += ["--context", context] if context else []

    def text(self, *words: str, stdin: str = "", timeout: float = 120) -> str:
        """Run kubectl and return its output. Raises KubectlError."""
        with _said():
            return run([*self.words, *words], stdin=stdin, timeout=timeout)

    def data(self, *words: str, stdin: str = "", timeout: float = 300) -> bytes:
        """Run kubectl and return its output as bytes. Raises KubectlError."""
        with _said():
            return run_bytes([*self.words, *words], stdin=stdin, timeout=timeout)

    def objects(self) -> str:
        """Return the objects of all namespaces that decide about packets, as a List in JSON. Raises KubectlError."""
        return self.text("get", ",".join(LISTED), "--all-namespaces", "-o", "json")

    def default_namespace(self) -> str:
        """Return the namespace that names without one are in; empty for `default`."""
        return self.namespace or self.text("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip()


@contextmanager
def _said() -> Iterator[None]:
    """Report what kubectl said."""
    try:
        yield
    except FileNotFoundError as error:
        raise KubectlError(f"{_PROGRAM} is not installed, or not on the PATH") from error
    except CommandError as error:
        raise KubectlError(f"{_PROGRAM}: {' '.join(error.said.split())[:600]}") from error
    except TimeoutExpired as error:
        raise KubectlError(f"{_PROGRAM} did not end within {error.timeout:.0f} s") from error
