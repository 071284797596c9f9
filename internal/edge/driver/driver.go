// Package driver is the contract between the edge and a backend (container, microVM, full VM, function call).
//
// The edge goes through named steps; a driver is the step that makes the sandbox run. It gets plain data that earlier
// steps made (a rootfs, a network slot, control groups), and gives a Handle from which any later process of the edge
// can find the sandbox again. A driver knows no sibling, no HTTP, no image store. Running commands, files, ports and
// terminals are not its business: they go to aether over the connection that DialGuest returns.
//
// # Life cycle
//
//	Create ── Start ── (Wait) ── Stop ── Destroy
//
// Create makes what the host needs (mounts, ids, sockets) and leaves nothing running. Start runs aether and returns once
// its process exists, not once it answers. Stop ends every process of the sandbox. Destroy removes what Create made.
//
// # What every implementation must keep (drivertest checks it)
//
//   - Stop and Destroy are idempotent, safe without Create, after a Create that failed or was cut at any point, and after
//     the edge was killed in the middle: everything they need follows from the ID and, if there is one, the Handle.
//   - Every name of a host object derives from the ID.
//   - A cancelled context ends the call soon, with what it made undone or left for Destroy.
//   - Wait returns once for every caller, also for a sandbox that ended before.
//   - An error is a *sandbox.Error if a user could do something about it.
package driver

import (
	"context"
	"encoding/json"
	"net"
	"net/netip"

	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// A Driver is one backend. All methods may be called concurrently for different ids; the edge serialises calls for one id.
type Driver interface {
	// Name is the backend's name, for example "container".
	Name() string
	// Probe says what the driver can do on this host, or the reason why it cannot work at all.
	Probe(ctx context.Context) (Capabilities, error)
	Create(ctx context.Context, spec Spec) (Handle, error)
	// Start runs what Create made. The returned handle replaces the one given.
	Start(ctx context.Context, h Handle) (Handle, error)
	// Stop kills every process. It returns when none is left.
	Stop(ctx context.Context, h Handle) error
	Destroy(ctx context.Context, h Handle) error
	// Wait blocks until aether's process has ended.
	Wait(ctx context.Context, h Handle) (Exit, error)
	// Recover finds a sandbox again after the edge restarted. Whatever the answer, Stop and Destroy remain valid.
	Recover(ctx context.Context, h Handle) (Status, error)
	// DialGuest connects to aether. It fails with Unavailable while aether does not listen.
	DialGuest(ctx context.Context, h Handle) (net.Conn, error)
	// Sweep removes everything of this driver on the host that belongs to no id in keep: what is left after a crash
	// between making an object and recording it. It returns the ids it found.
	Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error)
}

// A HostsWriter is a Driver that can replace the lines of Spec.Hosts while the sandbox runs. What else is in its /etc/hosts stays.
type HostsWriter interface {
	WriteHosts(ctx context.Context, h Handle, fs rootfs.Container, lines string) error
}

// A Spec is everything that Create needs. It is plain data.
type Spec struct {
	ID       sandbox.ID
	Hostname string
	Limits   sandbox.Limits
	Rootfs   rootfs.Container
	Network  Network
	Cgroups  Cgroups
	Hosts    string // lines for its /etc/hosts, beside its own
	GuestKey []byte // 32 bytes; aether asks the edge for it
}

// Network is the slot the network step acquired.
type Network struct {
	Namespace string `json:"namespace"` // path of the network namespace, owned by the initial user namespace
	Sysfs     string `json:"sysfs"`     // path of the masked sysfs mount that belongs to it
	// Addresses of its link to the outside; none where it has no link.
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// Cgroups are the groups the limits step made. Paths are absolute directories. On cgroup v2 with controllers V1 is empty;
// on a v1 host the limits are in V1 and the v2 tree carries freezing, killing and BPF.
type Cgroups struct {
	V2Aether string            `json:"v2_aether"`
	V2User   string            `json:"v2_user"`
	V1Aether map[string]string `json:"v1_aether,omitempty"` // controller -> directory
	V1User   map[string]string `json:"v1_user,omitempty"`
	CPUs     []int             `json:"cpus,omitempty"` // CPU mask of the user part; nil = all
}

// Trusted is what stops the user part, and the groups of trusted commands beside it. V1 is empty on cgroup v2.
type Trusted struct {
	Freeze string
	V2     string
	V1     map[string]string // controller -> directory
}

// A Handle finds a sandbox again. Data is the driver's own, versioned and opaque to everyone else.
type Handle struct {
	Driver  string          `json:"driver"`
	Version int             `json:"version"`
	ID      sandbox.ID      `json:"id"`
	Data    json.RawMessage `json:"data,omitempty"`
}

// Capabilities are data, not methods: callers ask before they try.
type Capabilities struct {
	Backend  string
	Features map[string]string // feature -> how it is provided here, for `dsec doctor`
	// Fallbacks are those features that are not provided in the best way that is known.
	Fallbacks map[string]Fallback
}

// Status is what Recover found.
type Status struct {
	Running bool
	Exit    Exit // if not running
}

// Exit says how aether's process ended. Code is -1 where the kernel no longer tells.
type Exit struct {
	Code   int
	Signal int
}

// A Fallback says of a feature what this host has not, why, and what it costs to do without.
type Fallback struct{ Instead, Why, Cost string }
