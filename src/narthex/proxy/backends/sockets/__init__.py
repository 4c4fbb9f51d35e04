"""Socket load balancing: rows of BPF maps for a plan, and the programs that read them."""
