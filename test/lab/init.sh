#!/bin/busybox sh
# /init of the initramfs: finds the disks, and goes on in the root file system.
B=/bin/busybox
$B mount -t devtmpfs dev /dev
$B mount -t proc proc /proc
while read -r module; do $B insmod "/modules/$module" || echo "lab: no module $module"; done </modules/order
for i in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vdd ] && break; $B sleep 0.1; done
$B mount -t ext4 /dev/vda /root
$B mount -t ext4 -o ro /dev/vdb /root/usr/lib/modules
$B mount -t ext4 -o ro /dev/vdc /root/lab
$B mount -t ext4 /dev/vdd /root/scratch
$B mount --move /dev /root/dev
$B umount /proc
exec $B switch_root /root /lab/setup.sh
