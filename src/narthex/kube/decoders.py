"""The forms of objects, made known to msgspec before several threads read objects.

msgspec works out how to read a type when it is first asked to, and two threads that ask at once end the process with
SIGSEGV (seen with 0.22). A proxy alone reads in one thread; the parts of a node read in several.
"""

from __future__ import annotations

import msgspec

from narthex.kube import messages
from narthex.model import wire
from narthex.model.decode.objects import KINDS, shape_of


def prepare_decoders() -> None:
    """Let msgspec work out all forms of objects and of what an API server says around them. Takes some milliseconds."""
    for module in (wire, messages):
        for found in vars(module).values():
            if (
                isinstance(found, type)
                and issubclass(found, msgspec.Struct)
                and not getattr(found, "__parameters__", ())
            ):
                msgspec.json.Decoder(found)
    for kind in KINDS:
        list(messages.read_lines(b"", shape_of(kind)))
    # A line that fits no shape is read as JSON.
    msgspec.json.Decoder(messages.WatchEvent[msgspec.Raw])
