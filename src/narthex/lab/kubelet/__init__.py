"""The lab's kubelet: decisions about pods as data. `program/` runs the pods."""
