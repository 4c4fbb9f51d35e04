"""Load balancers on bare metal, put together: the controller that gives addresses, the announcer that answers for them."""
