"""BPF objects of the kernel: maps, programs, links, and pins. Other folders import from here."""

from narthex.linux.bpf.maps import BpfMap
from narthex.linux.bpf.pins import file_system_problem, mount_bpf_file_system, pinned_names, unmount
from narthex.linux.bpf.programs import BpfLink, BpfProgram, VerifierError, attach_to_map, attached_links, can_load
from narthex.linux.bpf.rings import BpfRing, RingReports
from narthex.linux.bpf.syscall import BpfError

__all__ = [
    "BpfError",
    "BpfLink",
    "BpfMap",
    "BpfProgram",
    "BpfRing",
    "RingReports",
    "VerifierError",
    "attach_to_map",
    "attached_links",
    "can_load",
    "file_system_problem",
    "mount_bpf_file_system",
    "pinned_names",
    "unmount",
]
