#!/usr/bin/env bash
# Installs Debian packages that are missing. "run": what building and running dsec need; "test": the tests' as well;
# "lab": those of the guests that run tests.
set -euo pipefail
case "${1:-run}" in
run) want=(gcc libc6-dev musl-tools btrfs-progs busybox-static mmdebstrap iproute2 python3-pytest python3-pip git ca-certificates) ;;
test) want=(erofs-utils protobuf-compiler libprotobuf-dev python3-venv attr crun) ;;
lab) want=(qemu-system-x86 kmod e2fsprogs erofs-utils musl-tools mmdebstrap busybox-static xz-utils) ;;
bench) want=(crun docker.io) ;;
*) echo "usage: deps.sh run|test|lab|bench" >&2; exit 2 ;;
esac
missing=()
for p in "${want[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0
echo "installing: ${missing[*]}"
if [ "$(id -u)" = 0 ]; then sudo=(); elif command -v sudo >/dev/null; then sudo=(sudo); else
  echo "dsec: these packages are missing and this is not root: ${missing[*]}; run as root: apt-get install ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# Where systemd runs, installing docker.io and containerd starts their daemons, now and at every boot. The benchmark runs its
# own, and nobody asked for these: see policy-rc.d of Debian's init-system-helpers, and the end of this file.
policy=/usr/sbin/policy-rc.d daemons=()
if [[ " ${missing[*]} " = *" docker.io "* ]]; then
  daemons=(docker.service docker.socket)
  [ -e /usr/bin/containerd ] || daemons+=(containerd.service)
  if [ ! -e $policy ]; then # else its owner has decided
    trap '"${sudo[@]}" rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee $policy >/dev/null
    "${sudo[@]}" chmod 755 $policy
  fi
fi
if ! { "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  echo "dsec: installing ${missing[*]} failed; the log is $log" >&2
  exit 1
fi
rm -f "$log"
if [ ${#daemons[@]} -gt 0 ] && command -v systemctl >/dev/null; then
  "${sudo[@]}" systemctl disable --quiet "${daemons[@]}" || true # without systemd as init there is nothing to disable
fi
