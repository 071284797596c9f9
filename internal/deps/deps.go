package deps

import (
	_ "connectrpc.com/connect"
	_ "github.com/cilium/ebpf"
	_ "github.com/cilium/ebpf/asm"
	_ "github.com/cilium/ebpf/link"
	_ "github.com/vishvananda/netlink"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sync/singleflight"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/grpc"
	_ "modernc.org/sqlite"
)
