"""Policy: Snapshot to Plan. The only place where a decision about traffic is made. Pure."""
