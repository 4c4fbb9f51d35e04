"""Rules as typed data: the nodes that nft and iptables rules consist of."""
