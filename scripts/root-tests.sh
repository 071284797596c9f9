#!/usr/bin/env bash
# What the root tier consists of: every test in a *_root_test.go. "names" is a pattern for go test -run, "packages" where they are.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files -co --exclude-standard '*_root_test.go')
case "${1:-}" in
names) printf '^(%s)$' "$(grep -ohE '^func Test[A-Za-z0-9_]+' "${files[@]}" | sed 's/^func //' | grep -v '^TestMain$' | sort -u | paste -sd '|')" ;;
packages) dirname "${files[@]}" | sort -u | sed 's|^|./|' ;;
*) echo "usage: root-tests.sh names|packages" >&2; exit 2 ;;
esac
