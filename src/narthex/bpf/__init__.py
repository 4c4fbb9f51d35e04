"""BPF programs as typed data: instructions, an assembler, a listing, and an interpreter.

Other folders import from here, not from the modules of the package.
"""

from narthex.bpf.instructions import (
    AssemblyError,
    AtomicAdd,
    CallHelper,
    Compute,
    Condition,
    Exit,
    Helper,
    JumpAlways,
    JumpIf,
    Label,
    LoadConstant,
    LoadMap,
    LoadMemory,
    Operand,
    Operation,
    Register,
    Statement,
    StoreMemory,
    ToBigEndian,
    Width,
    assemble,
    maps_of,
)
from narthex.bpf.interpreter import BpfFault, Environment, run_program
from narthex.bpf.listing import listing
from narthex.bpf.maps import MapModel
from narthex.bpf.specification import NO_PREALLOCATION, AttachKind, BpfProgramSpec, MapKind, MapSpec, ProgramKind

__all__ = [
    "NO_PREALLOCATION",
    "AssemblyError",
    "AtomicAdd",
    "AttachKind",
    "BpfFault",
    "BpfProgramSpec",
    "CallHelper",
    "Compute",
    "Condition",
    "Environment",
    "Exit",
    "Helper",
    "JumpAlways",
    "JumpIf",
    "Label",
    "LoadConstant",
    "LoadMap",
    "LoadMemory",
    "MapKind",
    "MapModel",
    "MapSpec",
    "Operand",
    "Operation",
    "ProgramKind",
    "Register",
    "Statement",
    "StoreMemory",
    "ToBigEndian",
    "Width",
    "assemble",
    "listing",
    "maps_of",
    "run_program",
]
