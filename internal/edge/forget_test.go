package edge

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// keepingGuest is a fakeGuest that counts what it is told about its output.
type keepingGuest struct {
	*fakeGuest
	archived, forgotten *atomic.Int64
}

func (g keepingGuest) Archive() { g.archived.Add(1) }
func (g keepingGuest) Forget()  { g.forgotten.Add(1) }

// The goroutine that waits for times removes no files: deadlines of others are kept while that takes long.
func TestForgettingHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var dirs []string
		for range 3 {
			id := w.create()
			dir := filepath.Join(w.dir, "output", string(id))
			if err := os.MkdirAll(filepath.Join(dir, "much"), 0o700); err != nil {
				t.Fatal(err)
			}
			dirs = append(dirs, dir)
			w.delete(id, true)
		}
		slow := make(chan struct{})
		w.e.later(func() { <-slow })
		other := w.create(idle(20 * time.Minute))
		time.Sleep(21 * time.Minute)
		w.expect(other, stopped, sandbox.ReasonIdle)
		for _, dir := range dirs {
			if _, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: filepath.Base(dir)}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.NotFound {
				t.Errorf("%v", err)
			}
			if _, err := os.Stat(dir); err != nil {
				t.Errorf("not later: %v", err)
			}
		}
		close(slow)
		synctest.Wait()
		for _, dir := range dirs {
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("left: %s, %v", dir, err)
			}
		}
		w.close()
	})
}

// What a sandbox that has ended remembers costs less, and nothing once it is forgotten.
func TestEndedSandboxesKeepLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var archived, forgotten atomic.Int64
		w := newWorld(t, func(o *Options) {
			o.Guests = func(ctx context.Context, g GuestOptions) (Guest, error) {
				f, err := connectFake(ctx, g)
				if err != nil {
					return nil, err
				}
				return keepingGuest{f.(*fakeGuest), &archived, &forgotten}, nil
			}
		})
		id := w.create()
		in := w.find(id)
		w.delete(id, true)
		synctest.Wait()
		if archived.Load() != 1 || forgotten.Load() != 0 || in.snapshot().guest == nil {
			t.Errorf("ended: archived %d times, forgotten %d times", archived.Load(), forgotten.Load())
		}
		time.Sleep(11 * time.Minute)
		if forgotten.Load() != 1 || in.snapshot().guest != nil {
			t.Errorf("forgotten %d times; its guest is %v", forgotten.Load(), in.snapshot().guest)
		}
		w.e.index.mu.Lock()
		if n := len(w.e.index.terminal); n != 0 {
			t.Errorf("%d forgotten sandboxes are still held", n)
		}
		w.e.index.mu.Unlock()
		w.close()
	})
}
