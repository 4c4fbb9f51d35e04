"""The CNI plugins as programs: a request in, a pod's network made or taken away, a result out."""
