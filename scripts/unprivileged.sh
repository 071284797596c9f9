#!/usr/bin/env bash
# Runs a test binary without any capability: as root it keeps the uid (it must read the work tree) and loses all power.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
  exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
fi
exec "$@"
