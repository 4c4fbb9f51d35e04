"""Narthex: the Kubernetes Service network in Python.

    import narthex

    shop = narthex.load("examples/shop", node="node-a", cluster_cidr="10.244.0.0/16")
    print(narthex.trace(shop, "outside", "node-a:30080"))

The names in `__all__` are the public API; `narthex.api` defines them. They are loaded when they are first used, since the CNI
plugins import this package and must start within milliseconds.
"""

__version__ = "0.1.0"
__all__ = ["Explanation", "InputError", "__version__", "check", "load", "plan", "render", "trace"]


def __getattr__(name: str) -> object:
    """Load a name of the public API."""
    if name not in __all__:
        raise AttributeError(f"module 'narthex' has no attribute {name!r}")
    import importlib

    # A name, not an import statement: no other module of the project depends on the API.
    return getattr(importlib.import_module("narthex.api"), name)
