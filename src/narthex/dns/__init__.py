"""DNS server for Services and pods, compatible with CoreDNS. See README.md for the stages and the path of a query."""
