"""Addresses for Services of type LoadBalancer: allocation, announcement by ARP and NDP, and explanations."""
