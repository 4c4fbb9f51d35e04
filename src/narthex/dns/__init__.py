"""Names of Services and pods: which records there are, how questions are read and answers written. No I/O."""
