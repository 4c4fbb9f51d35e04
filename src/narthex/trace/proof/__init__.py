"""Proofs that rules do with all packets what the plan decides."""
