#!/bin/sh
# PID 1 of a guest: what a Debian host has when its services are up, then the agent.
export PATH=/lab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TMPDIR=/tmp
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mkdir -p /dev/pts /dev/shm /dev/mqueue
mount -t devpts -o nosuid,noexec,gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o nosuid,nodev tmpfs /dev/shm
mount -t mqueue -o nosuid,nodev,noexec mqueue /dev/mqueue
mount -t tmpfs -o nosuid,nodev,mode=755,size=20% tmpfs /run
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount -t securityfs -o nosuid,nodev,noexec securityfs /sys/kernel/security
mount -t bpf -o nosuid,nodev,noexec,mode=700 bpf /sys/fs/bpf
for dir in tmp var/tmp var/lib root; do
  mkdir -p "/scratch/$dir"
  mount --bind "/scratch/$dir" "/$dir"
done
chmod 1777 /tmp /var/tmp
mkdir -p /var/tmp/dsec-test/minbase
mount --bind /minbase /var/tmp/dsec-test/minbase
cp -r /edge-layer /var/tmp/dsec-test/ # tests make links to it
chmod 700 /root
ln -s /proc/self/fd /dev/fd
for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${n%:*}" "/dev/${n#*:}"; done
ip link set lo up
hostname lab
mount --make-rshared / # after the binds, or each would be there twice
modprobe -a loop overlay
# As systemd would: controllers are on, and what runs has a group of its own.
echo '+cpuset +cpu +io +memory +pids' >/sys/fs/cgroup/cgroup.subtree_control
mkdir -p /sys/fs/cgroup/system.slice/lab.service
echo '+cpuset +cpu +io +memory +pids' >/sys/fs/cgroup/system.slice/cgroup.subtree_control
echo $$ >/sys/fs/cgroup/system.slice/lab.service/cgroup.procs
ulimit -Hn 524288
for port in /sys/class/virtio-ports/*; do [ "$(cat "$port/name")" = lab ] && break; done
/lab/agent "/dev/${port##*/}"
echo "lab: the agent has ended"
exec /bin/busybox poweroff -f
