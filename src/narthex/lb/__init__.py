"""Load balancers on bare metal: addresses that are given, announced, and explained. Pure; effects are in `host/lb`."""
