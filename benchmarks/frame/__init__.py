"""What benchmarks share: the machine, its speed at the moment, tables beside a floor, and their files."""
