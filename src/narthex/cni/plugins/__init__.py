"""What each CNI plugin configures: interfaces, addresses, host ports, and masquerading. Pure."""
