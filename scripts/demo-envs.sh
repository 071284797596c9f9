#!/usr/bin/env bash
# Makes the environments of the demo and of the end-to-end tests, where the platform does not have them yet:
#   base       debian-python:12   Debian 12 with Python and pytest
#   workspace  sqlparse:0.6.1     a real project with its own tests, in /workspace/sqlparse
#   toolkit    ripgrep:13         a search tool as an agent's harness would bring, in /opt/ripgrep
# The trees are built once in build/ (they need root for ownership) and then imported from tar archives.
set -euo pipefail
cd "$(dirname "$0")/.."
dsec=${DSEC_BIN:-bin}/dsec
out=build
mkdir -p "$out"

say() { printf '  %s\n' "$*"; }
have() { "$dsec" "$1" inspect "$2" --json >/dev/null 2>&1; }
scratch=$(mktemp -d)
chmod 755 "$scratch" # apt downloads as a user of its own
trap 'rm -rf "$scratch" "$out"/*.part.$$' EXIT
# made NAME FUNCTION: makes build/NAME, unless it is there. The function is called as a command of its own, not in an if or
# before && or ||: in all that is called there set -e does not hold, and half of a tree would be packed and kept.
made() {
  local file=$out/$1 part=$out/$1.part.$$
  if [ -s "$file" ]; then return; fi
  "$2" "$part"
  mv "$part" "$file"
}
# logged COMMAND...: runs it, and shows the end of what it said only if it fails.
logged() {
  local status=0
  "$@" >"$scratch/log" 2>&1 || status=$?
  [ $status = 0 ] || { tail -20 "$scratch/log" >&2; echo "dsec: $1 failed (exit status $status)" >&2; }
  return $status
}

base() {
  say "building the base image from Debian packages (about 20 s)"
  logged mmdebstrap --quiet --variant=minbase --include=python3,python3-pytest \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --format=tar bookworm "$1"
}
workspace() {
  say "fetching the project under test (sqlparse 0.6.1, source distribution)"
  local sdist=$scratch/sqlparse-0.6.1.tar.gz root=$scratch/workspace
  logged /usr/bin/python3 -m pip download -q --disable-pip-version-check --no-deps --no-binary sqlparse -d "$scratch" sqlparse==0.6.1
  echo "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7  $sdist" | logged sha256sum -c -
  mkdir -p "$root/workspace"
  tar -xzf "$sdist" -C "$root/workspace" --no-same-owner
  mv "$root/workspace/sqlparse-0.6.1" "$root/workspace/sqlparse"
  # With its bytecode, as a workspace that is made with care has it: else each sandbox compiles the same files once more.
  cd "$root/workspace/sqlparse"
  logged env -i PATH=/usr/bin:/bin python3 -m pytest -q -p no:cacheprovider --collect-only tests # fails if there are none
  cd "$OLDPWD"
  tar -C "$root" --owner=0 --group=0 --numeric-owner --sort=name -cf "$1" workspace
}
toolkit() {
  say "fetching the toolkit (ripgrep, Debian package)"
  local root=$scratch/toolkit
  cd "$scratch"
  if ! apt-get download -qq ripgrep >/dev/null 2>&1; then # no lists of packages yet, or old ones
    logged apt-get update -qq
    logged apt-get download -qq ripgrep
  fi
  cd "$OLDPWD"
  dpkg -x "$scratch"/ripgrep_*.deb "$scratch/deb"
  mkdir -p "$root/opt/ripgrep/bin"
  cp "$scratch/deb/usr/bin/rg" "$root/opt/ripgrep/bin/rg"
  tar -C "$root" --owner=0 --group=0 --numeric-owner --sort=name -cf "$1" opt
}

if ! have image debian-python:12; then
  made base.tar base
  say "importing debian-python:12"
  "$dsec" image create debian-python:12 --from-tar "$out/base.tar" --json >/dev/null
fi
made workspace.tar workspace # the demo's run on this host takes it from there, also where the platform has it
if ! have workspace sqlparse:0.6.1; then
  say "importing sqlparse:0.6.1"
  "$dsec" workspace create sqlparse:0.6.1 --from-tar "$out/workspace.tar" --json >/dev/null
fi
if ! have toolkit ripgrep:13; then
  made toolkit.tar toolkit
  say "importing ripgrep:13"
  "$dsec" toolkit create ripgrep:13 --from-tar "$out/toolkit.tar" -e PATH=/opt/ripgrep/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --json >/dev/null
fi
