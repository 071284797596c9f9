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
# made NAME COMMAND...: runs the command to make build/NAME, unless it is there whole.
made() {
  local file=$out/$1; shift
  [ -s "$file" ] && return 0
  "$@" "$file.part" && mv "$file.part" "$file"
}

base() {
  say "building the base image from Debian packages (about 20 s)"
  local log; log=$(mktemp)
  mmdebstrap --quiet --variant=minbase --include=python3,python3-pytest \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --format=tar bookworm "$1" >"$log" 2>&1 || { tail -20 "$log" >&2; echo "dsec: mmdebstrap failed; its log is $log" >&2; return 1; }
  rm -f "$log"
}
workspace() {
  say "fetching the project under test (sqlparse 0.6.1, source distribution)"
  local tmp; tmp=$(mktemp -d)
  python3 -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d "$tmp" sqlparse==0.6.1
  mkdir -p "$tmp/root/workspace"
  tar -xzf "$tmp"/sqlparse-0.6.1.tar.gz -C "$tmp/root/workspace" --no-same-owner
  mv "$tmp/root/workspace/sqlparse-0.6.1" "$tmp/root/workspace/sqlparse"
  # With its bytecode, as a workspace that is made with care has it: else each sandbox compiles the same files once more.
  (cd "$tmp/root/workspace/sqlparse" && env -i PATH=/usr/bin:/bin python3 -m pytest -q -p no:cacheprovider --collect-only tests >/dev/null)
  tar -C "$tmp/root" --owner=0 --group=0 --numeric-owner --sort=name -cf "$1" workspace
  rm -rf "$tmp"
}
toolkit() {
  say "fetching the toolkit (ripgrep, Debian package)"
  local tmp; tmp=$(mktemp -d)
  chmod 755 "$tmp"
  (cd "$tmp" && apt-get download -qq ripgrep >/dev/null)
  mkdir -p "$tmp/deb" "$tmp/root/opt/ripgrep/bin"
  dpkg -x "$tmp"/ripgrep_*.deb "$tmp/deb"
  cp "$tmp/deb/usr/bin/rg" "$tmp/root/opt/ripgrep/bin/rg"
  tar -C "$tmp/root" --owner=0 --group=0 --numeric-owner --sort=name -cf "$1" opt
  rm -rf "$tmp"
}

have image debian-python:12 || { made base.tar base; say "importing debian-python:12"; "$dsec" image create debian-python:12 --from-tar "$out/base.tar" --json >/dev/null; }
have workspace sqlparse:0.6.1 || { made workspace.tar workspace; say "importing sqlparse:0.6.1"; "$dsec" workspace create sqlparse:0.6.1 --from-tar "$out/workspace.tar" --json >/dev/null; }
have toolkit ripgrep:13 || { made toolkit.tar toolkit; say "importing ripgrep:13"; "$dsec" toolkit create ripgrep:13 --from-tar "$out/toolkit.tar" -e PATH=/opt/ripgrep/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --json >/dev/null; }
[ -s "$out/workspace.tar" ] || made workspace.tar workspace
