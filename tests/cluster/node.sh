#!/bin/sh
# The first process of a node: its file system, a container runtime, and a kubelet. It runs in a PID namespace of its own, so that
# with its end the kernel ends everything that the node has started, and in a mount namespace, whose mounts go with it.
#
# node.sh DIRECTORY NODE ADDRESSES HOST_NAME
set -eu
directory=$1 node=$2 addresses=$3 host=$4
root=$directory/root

mount --make-rprivate /
mount --bind "$root" "$root"
for folder in bin sbin lib lib64; do [ -h /$folder ] && ln -sf "usr/$folder" "$root/$folder"; done
mkdir -p "$root/usr" "$root/etc/alternatives" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp" "$root/root" "$root/programs" \
  "$root/var/log/pods" "$root/var/lib/kubelet" "$root/var/lib/containerd" "$root/opt/cni/bin" "$root/etc/cni/net.d"
ln -sf ../run "$root/var/run"
mount --bind -o ro /usr "$root/usr"
mount --bind -o ro /etc/alternatives "$root/etc/alternatives"
for program in "$directory"/programs/*; do
  touch "$root/programs/${program##*/}"
  mount --bind "$(readlink -f "$program")" "$root/programs/${program##*/}"
done
for file in passwd group nsswitch.conf os-release; do cp "/etc/$file" "$root/etc/$file"; done
printf '127.0.0.1 localhost\n::1 localhost\n' > "$root/etc/hosts"
# A node has no Python: what needs one brings it.
for python in "$root"/usr/bin/python3*; do mount --bind /dev/null "$python"; done
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755,size=256m tmpfs "$root/run"
mount -t tmpfs -o mode=1777,size=256m tmpfs "$root/tmp"
mkdir -p "$root/run/lock" "$root/run/old"
# A file system of BPF objects of its own: they go with it.
! [ -d "$root/sys/fs/bpf" ] || mount -t bpf bpf "$root/sys/fs/bpf"
# Control groups: only those below the node's own, as the cgroup namespace shows them.
mount -t tmpfs -o mode=755,size=1m tmpfs "$root/sys/fs/cgroup"
for controller in $(cat "$directory/controllers"); do
  mkdir "$root/sys/fs/cgroup/$controller"
  mount -t cgroup -o "$controller" cgroup "$root/sys/fs/cgroup/$controller"
done
if [ -d /sys/fs/cgroup/unified ]; then
  mkdir "$root/sys/fs/cgroup/unified"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
fi
if ! [ -s "$directory/controllers" ]; then
  umount "$root/sys/fs/cgroup"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  # Processes may only be in the leaves of a tree whose controllers are delegated.
  mkdir "$root/sys/fs/cgroup/init"
  echo 0 > "$root/sys/fs/cgroup/init/cgroup.procs"
fi
cd "$root"
pivot_root . run/old
exec < /dev/null
umount -l /run/old
rmdir /run/old
# A kubelet changes these settings, which are the whole machine's: it finds the values that it wants, and changes nothing.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 \
  kernel/keys/root_maxbytes=25000000; do
  file=/run/settings-$(echo "${setting%=*}" | tr / -)
  echo "${setting#*=}" > "$file"
  [ -e "/proc/sys/${setting%=*}" ] && mount --bind "$file" "/proc/sys/${setting%=*}"
done
mount --make-rshared /
hostname "$host"
export PATH=/programs:/usr/sbin:/usr/bin HOME=/root

keep() {
  while true; do
    "$@" || true
    echo "node.sh: $1 has ended; it is started again" >&2
    sleep 1
  done
}
keep containerd --config /etc/node/containerd.toml > /etc/node/containerd.log 2>&1 &
until [ -S /run/containerd/containerd.sock ]; do sleep 0.1; done
keep kubelet --config=/etc/node/kubelet.json --kubeconfig=/etc/node/kubeconfig "--hostname-override=$node" \
  "--node-ip=$addresses" --v=2 > /etc/node/kubelet.log 2>&1 &
wait
