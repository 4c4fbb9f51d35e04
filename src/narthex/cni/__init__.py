"""CNI plugins: requests, results, address allocation, and what each plugin configures."""
