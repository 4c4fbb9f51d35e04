"""BPF programs as typed data: instructions, an assembler, a listing, and an interpreter.

Other folders import from here, not from the modules of the package.
"""

from narthex.bpf.instructions import (
    AssemblyError,
    AtomicAdd,
    Call,
    Compute,
    Condition,
    Exit,
    Helper,
    Jump,
    JumpIf,
    Label,
    Load,
    LoadConstant,
    LoadMap,
    Node,
    Operand,
    Operation,
    Register,
    Store,
    ToBigEndian,
    Width,
    assemble,
    maps_of,
)
from narthex.bpf.interpreter import BpfFault, Environment, run_program
from narthex.bpf.listing import listing
from narthex.bpf.maps import MapModel
from narthex.bpf.specification import NO_PREALLOCATION, AttachKind, MapKind, MapSpec, ProgramKind, ProgramSpec

__all__ = [
    "NO_PREALLOCATION",
    "AssemblyError",
    "AtomicAdd",
    "AttachKind",
    "BpfFault",
    "Call",
    "Compute",
    "Condition",
    "Environment",
    "Exit",
    "Helper",
    "Jump",
    "JumpIf",
    "Label",
    "Load",
    "LoadConstant",
    "LoadMap",
    "MapKind",
    "MapModel",
    "MapSpec",
    "Node",
    "Operand",
    "Operation",
    "ProgramKind",
    "ProgramSpec",
    "Register",
    "Store",
    "ToBigEndian",
    "Width",
    "assemble",
    "listing",
    "maps_of",
    "run_program",
]
