#!/usr/bin/env bash
# Ends the local platform and removes everything it made, its data included.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ]; then exec sudo -E "$0" "$@"; fi
dsec=${DSEC_BIN:-bin}/dsec
if [ ! -x "$dsec" ]; then
  echo "nothing to stop: $dsec is not built"
  exit 0
fi
rm -f build/demo-passed
exec "$dsec" down --purge
