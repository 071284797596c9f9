//go:build rootful

package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/drivertest"
	"dsec/internal/linux"
	"dsec/sandbox"
)

func TestRootConformance(t *testing.T) {
	b := newBench(t)
	made := map[sandbox.ID]driver.Spec{}
	spec := func(t *testing.T, id sandbox.ID) driver.Spec {
		t.Helper()
		if s, again := made[id]; again {
			must(t, os.RemoveAll(s.Rootfs.Upper.Dir))
			for _, name := range []string{"/u", "/w", "/etc"} {
				must(t, os.MkdirAll(s.Rootfs.Upper.Dir+name, 0o755))
			}
			return s
		}
		s := b.specFor(id)
		made[id] = s
		t.Cleanup(func() { b.cleanup(id) })
		return s
	}
	drivertest.Run(t, drivertest.Harness{
		Driver: b.driver,
		Edge:   "test2",
		Spec:   spec,
		Broken: func(t *testing.T, id sandbox.ID) driver.Spec {
			s := spec(t, id)
			s.Rootfs.Lowers = []string{"/nonexistent"}
			return s
		},
		Kill: func(t *testing.T, h driver.Handle) {
			pids, err := b.tree.Pids(h.ID)
			must(t, err)
			for _, pid := range pids {
				must(t, linux.Kill(pid))
			}
		},
		Reused: func(t *testing.T, h driver.Handle) driver.Handle {
			rec, err := parseHandle(h)
			must(t, err)
			rec.Pid = os.Getpid()
			h.Data, err = json.Marshal(rec)
			must(t, err)
			return h
		},
		Objects: func(t *testing.T) []string {
			f := b.footprint()
			out := f.files
			ids, err := os.ReadDir(b.tree.Root())
			must(t, err)
			for _, e := range ids {
				if pids, err := b.tree.Pids(sandbox.ID(e.Name())); e.IsDir() && err == nil {
					for _, pid := range pids {
						out = append(out, fmt.Sprintf("process %d of %s", pid, e.Name()))
					}
				}
			}
			return out
		},
		Restart: func(t *testing.T) driver.Driver {
			d, err := Open(context.Background(), b.opts)
			must(t, err)
			t.Cleanup(d.Detach)
			return d
		},
	})
	// Two drivers were at work in one directory, and the first missed what the second gave back.
	b.reopen()
}
