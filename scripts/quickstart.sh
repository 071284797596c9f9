#!/usr/bin/env bash
# Starts a local platform if none runs, makes the demo's environments, runs the demo, says what to try next.
set -euo pipefail
cd "$(dirname "$0")/.."
export DSEC_BIN=${DSEC_BIN:-$PWD/bin}
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "dsec: sandboxes need root on this host; run make quickstart as root" >&2; exit 1; }
  exec sudo -E "$0" "$@"
fi
echo "1/3 platform"
"$DSEC_BIN/dsec" up --detach
echo "2/3 environments"
scripts/demo-envs.sh
echo "3/3 demo"
PYTHONPATH=sdk/python/src:sdk/python python3 examples/demo.py --count "${N:-50}"
cat <<TEXT

The platform goes on running. Its URL and key are in ${DSEC_CONFIG:-${XDG_CONFIG_HOME:-$HOME/.config}/dsec/config.json}. Try:

  bin/dsec run --rm debian-python:12 python3 -c 'print("hello from a sandbox")'
  bin/dsec run -d --workspace sqlparse:0.6.1 --toolkit ripgrep:13 debian-python:12
  bin/dsec ps

make stop ends it and leaves nothing.
TEXT
