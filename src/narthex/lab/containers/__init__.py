"""Programs in namespaces of their own: what a container runtime does, for programs of this machine.

forks.py        a process that was forked early and forks others on request; what starts containers and nodes quickly
program.py      what is to run, as data
inside.py       the last steps of a forked process: namespaces, mounts, exec
keeper.py       the process beside each container: its log, its signals, its end
log.py          the container's log file
container.py    the handle of whoever asked for it
"""
