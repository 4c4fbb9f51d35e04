"""The CNI plugins as programs: a request in, the pod's network configured or removed, a result out."""
