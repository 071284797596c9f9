// Package fake is a host in memory, or in a directory that outlives its process: a driver that passes drivertest and runs
// nothing, and the other parts that an edge needs. Everything can fail, block and die on command, and everything that was
// made and not removed is counted.
//
// What surprises: Host.On is called both before a call has made anything ("driver.Create") and after it has
// ("driver.Create:after"), so that a test can cut a call at both ends. With a directory, a "process" is a file: it lives
// on when the process of the test is killed, as a real sandbox does.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"dsec/internal/edge/network"
	"dsec/sandbox"
)

// A Host holds what the fakes make. It is safe for concurrent use.
type Host struct {
	dir string // "" = memory

	// Serve answers on the other end of DialGuest; it owns conn. nil keeps the connection open and says nothing.
	Serve func(conn net.Conn, id sandbox.ID, key []byte)

	mu      sync.Mutex
	objects map[string][]byte // "kind/id"
	hooks   map[string]func(context.Context, sandbox.ID) error
	procs   map[sandbox.ID]*process // that this Host saw
	oom     map[string]int64        // by v2 directory
	policy  map[sandbox.ID]network.Policy
	hosts   map[sandbox.ID]string
	free    int64
	total   int64
}

// NewHost makes a host in memory.
func NewHost() *Host {
	return &Host{
		objects: make(map[string][]byte), hooks: make(map[string]func(context.Context, sandbox.ID) error),
		procs: make(map[sandbox.ID]*process), oom: make(map[string]int64), policy: make(map[sandbox.ID]network.Policy), hosts: make(map[sandbox.ID]string), free: 100 << 30, total: 200 << 30,
	}
}

// OpenHost makes a host whose objects are files below dir, or finds them there.
func OpenHost(dir string) *Host {
	h := NewHost()
	h.dir = dir
	return h
}

// On runs f in every call named call ("driver.Create", "uppers.Remove:after", ...); an error fails the call. nil removes it.
func (h *Host) On(call string, f func(ctx context.Context, id sandbox.ID) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f == nil {
		delete(h.hooks, call)
		return
	}
	h.hooks[call] = f
}

// SetFree is what the disk of the uppers has.
func (h *Host) SetFree(free, total int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free, h.total = free, total
}

// SetOOM sets the count of out-of-memory kills of a group's part, by its v2 directory.
func (h *Host) SetOOM(dir string, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.oom[dir] = n
}

// Objects lists everything that is on the host, sorted, as "kind/id".
func (h *Host) Objects() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []string
	for _, kind := range kinds {
		for _, id := range h.listLocked(kind) {
			out = append(out, kind+"/"+string(id))
		}
	}
	slices.Sort(out)
	return out
}

// Kinds of objects.
var kinds = []string{"created", "process", "upper", "network", "cgroup", "layers"}

// call runs a call's hooks around do.
func (h *Host) call(ctx context.Context, name string, id sandbox.ID, do func() error) error {
	if err := h.hook(ctx, name, id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return h.hook(ctx, name+":after", id)
}

func (h *Host) hook(ctx context.Context, name string, id sandbox.ID) error {
	h.mu.Lock()
	f := h.hooks[name]
	h.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(ctx, id)
}

func (h *Host) put(kind string, id sandbox.ID, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding object: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dir == "" {
		h.objects[kind+"/"+string(id)] = b
		return nil
	}
	if err := os.MkdirAll(filepath.Join(h.dir, kind), 0o700); err != nil {
		return err
	}
	tmp := filepath.Join(h.dir, kind, "."+string(id)) // a kill in the middle must not leave half an object
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(h.dir, kind, string(id)))
}

// get reports whether the object is there, and decodes it into v.
func (h *Host) get(kind string, id sandbox.ID, v any) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.objects[kind+"/"+string(id)]
	if h.dir != "" {
		b, _ = os.ReadFile(filepath.Join(h.dir, kind, string(id)))
	}
	return b != nil && (v == nil || json.Unmarshal(b, v) == nil)
}

func (h *Host) remove(kind string, id sandbox.ID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.objects, kind+"/"+string(id))
	if h.dir == "" {
		return nil
	}
	if err := os.Remove(filepath.Join(h.dir, kind, string(id))); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (h *Host) list(kind string) []sandbox.ID {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.listLocked(kind)
}

func (h *Host) listLocked(kind string) (ids []sandbox.ID) {
	for k := range h.objects {
		if id, ok := strings.CutPrefix(k, kind+"/"); ok {
			ids = append(ids, sandbox.ID(id))
		}
	}
	if h.dir == "" {
		return ids
	}
	entries, _ := os.ReadDir(filepath.Join(h.dir, kind)) // not there yet: nothing was made
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			ids = append(ids, sandbox.ID(e.Name()))
		}
	}
	return ids
}
