"""The load balancer programs: the controller that allocates addresses and the announcer that answers for them."""
