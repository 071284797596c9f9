#!/usr/bin/env bash
# Makes the virtual environment of the tests, once per set of requirements.
set -euo pipefail
venv=$1
requirements=sdk/python/requirements-dev.txt
if [ -e "$venv/.done" ] && cmp -s "$requirements" "$venv/.done"; then exit 0; fi
echo "making $venv"
python3 -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check -r "$requirements"
"$venv/bin/pip" install -q --disable-pip-version-check -e sdk/python
cp "$requirements" "$venv/.done"
