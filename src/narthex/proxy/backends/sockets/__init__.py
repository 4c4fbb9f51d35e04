"""Socket load balancing: rows of BPF maps for a plan, and the programs that read them."""

PIN_DIRECTORY = "/sys/fs/bpf/narthex"
"""Where maps, programs, and links are pinned, in a directory for each network namespace."""
