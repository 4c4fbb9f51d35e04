"""The lab's controllers: what the cluster is and what it must become, as writes. `turn.py` first. No I/O."""
