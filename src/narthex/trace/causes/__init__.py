"""Why a path fails: the causes, found in a journey, in what is known of the nodes, and in the cluster's objects. Pure."""
