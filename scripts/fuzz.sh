#!/usr/bin/env bash
# Runs every fuzz target of the module for a while, one after the other.
set -euo pipefail
time=${1:-60s}
cd "$(dirname "$0")/.."
while IFS=: read -r file name; do
  pkg=./$(dirname "$file")
  echo "== $pkg $name"
  go test -run '^$' -fuzz "^$name\$" -fuzztime "$time" "$pkg"
done < <(git ls-files '*_test.go' | xargs grep -oHE '^func Fuzz[A-Za-z0-9_]+' | sed 's/func //' | sort)
