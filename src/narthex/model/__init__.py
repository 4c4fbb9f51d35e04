"""Kubernetes objects, addresses, and packets as immutable values. Imports nothing else of Narthex.

The vocabulary that all folders share is imported from here: `from narthex.model import IPFamily, Service, Snapshot`. A
module is loaded when the first of its names is used, since the CNI plugins import this package and must start within
milliseconds. Modules of this folder import each other directly.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.model.net import *  # noqa: F403
    from narthex.model.objects import *  # noqa: F403
    from narthex.model.packet import *  # noqa: F403
    from narthex.model.problem import *  # noqa: F403
    from narthex.model.store import *  # noqa: F403
else:
    _VOCABULARY = ("net", "problem", "packet", "objects", "store")
    """Each imports only modules before it, so that a name loads no more than it needs."""

    def __getattr__(name: str) -> object:
        """Load a name of the vocabulary."""
        from importlib import import_module

        for module in () if name.startswith("_") else _VOCABULARY:
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                # Kept, so that Python asks here only once for each name.
                return globals().setdefault(name, names[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
