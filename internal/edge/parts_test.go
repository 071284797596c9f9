package edge

import (
	"dsec/internal/edge/cgroup"
	"dsec/internal/edge/layers"
	"dsec/internal/edge/network"
	"dsec/internal/edge/upper"
)

// The real parts are what the edge needs.
var (
	_ Cgroups  = (*cgroup.Tree)(nil)
	_ Layers   = (*layers.Mounts)(nil)
	_ Networks = (*network.Slots)(nil)
	_ Uppers   = (*upper.Pool)(nil)
)
