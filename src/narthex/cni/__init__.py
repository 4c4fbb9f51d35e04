"""CNI plugins without a machine: requests, results, address choice, and what each plugin wants of the node."""
