#!/bin/sh
# Stands in for the compilers, which a guest does not have: what tests build with them was built before, and is copied.
out='' program=stage
for word; do
  [ "$last" = -o ] && out=$word
  [ "$word" = dsec/cmd/aether ] && program=aether
  last=$word
done
exec cp "/lab/programs/$program" "$out"
