"""What a change of mode or of objects does to packets: the comparison behind `narthex migrate` and `narthex diff`."""
