#!/usr/bin/env bash
# Fails if committed generated code differs from what the generators make now.
set -euo pipefail
cd "$(dirname "$0")/.."
before=$(git status --porcelain=v1 -- api sdk/python | sha256sum; git diff -- api sdk/python | sha256sum)
api/generate.sh
python3 sdk/python/scripts/unasync.py
after=$(git status --porcelain=v1 -- api sdk/python | sha256sum; git diff -- api sdk/python | sha256sum)
if [ "$before" != "$after" ]; then
  git diff --stat -- api sdk/python >&2
  echo "dsec: generated code was not up to date; it is now: look at it and commit it (make generate)" >&2
  exit 1
fi
