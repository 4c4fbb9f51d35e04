"""The ipvs Target."""
