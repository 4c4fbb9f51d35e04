"""A small container runtime for programs of this machine.

`forks` is a process that was forked early and forks others quickly, `program` describes what to run and has the last steps of a forked
process (namespaces, mounts, exec), `keeper` is the process that supervises each container, `log` is the container's log file, and
`container` is the caller's handle.
"""
