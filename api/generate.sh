#!/usr/bin/env bash
# Generates the Go code of the contracts. Needs protoc (Debian: protobuf-compiler); the plug-ins are tools of go.mod.
set -euo pipefail
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for tool in google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc connectrpc.com/connect/cmd/protoc-gen-connect-go; do
  go build -o "$bin/" "$tool"
done
run() { PATH="$bin:$PATH" protoc -I . --go_out=.. --go_opt=module=dsec "$@"; }
run --connect-go_out=.. --connect-go_opt=module=dsec dsec/v1/dsec.proto
run --go-grpc_out=.. --go-grpc_opt=module=dsec edge/v1/edge.proto
run aether/v1/aether.proto
