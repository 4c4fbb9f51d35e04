"""The Kubernetes API as a source: lists and watches kept up through whatever a server and a network can do.

`resources` says what is asked for, `watch` is the protocol (pure), `watch` also turns objects into events, `access` and
`client` are the way to the server, `session` drives watches over it, `source` is what the proxy plugs in.
"""
