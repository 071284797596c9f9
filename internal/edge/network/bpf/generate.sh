#!/usr/bin/env bash
# Compiles the packet filter. The object is committed, so that building needs no clang; filter.sum says of which sources it is.
set -euo pipefail
cd "$(dirname "$0")"
if command -v clang >/dev/null; then
  clang -O2 -g -target bpf -mcpu=v2 -Wall -Wextra -Werror -Wno-missing-field-initializers -fdebug-prefix-map="$PWD=." \
    -I/usr/include/"$(gcc -dumpmachine)" -c filter.c -o filter.o
  llvm-strip -g filter.o
  cat filter.c kernel.h generate.sh | sha256sum | cut -d' ' -f1 >filter.sum
elif [ "$(cat filter.c kernel.h generate.sh | sha256sum | cut -d' ' -f1)" != "$(cat filter.sum)" ]; then
  echo "the packet filter's sources have changed: install clang and llvm, and run make generate" >&2
  exit 1
fi
