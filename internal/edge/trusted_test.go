package edge

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

type fakeTools struct{}

func (fakeTools) Mount() int { return 77 }

func TestTrustedCommands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(o *Options) { o.Tools = fakeTools{} })
		id := w.create()
		for _, cmd := range []*dsecv1.Command{{Shell: "true"}, {Shell: "true", User: "7:8", TimeoutSeconds: 5}} {
			cmd.Trusted = true
			if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), Command: cmd}); err != nil {
				t.Fatal(err)
			}
		}
		v, _ := w.guests.Load(id)
		g := v.(*fakeGuest)
		if len(g.trusts) != 1 || g.trusts[0].Tools != 77 || g.trusts[0].Group == "" {
			t.Errorf("handed over: %+v", g.trusts)
		}
		if g.last.User != "7:8" || g.last.Timeout != 5*time.Second || g.last.Cwd != "" {
			t.Errorf("%+v", g.last)
		}
		w.close()
	})
}

// A sandbox that ends while it is told of trusted commands takes what they need with it: that is no fault of the platform.
func TestTrustedCommandOfASandboxThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(o *Options) { o.Tools = fakeTools{} })
		id := w.create()
		v, _ := w.guests.Load(id)
		v.(*fakeGuest).onTrust = func() error {
			w.delete(id, true)
			return os.ErrNotExist
		}
		_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Shell: "true", Trusted: true}})
		if sandbox.ReasonOf(grpcerr.FromStatus(err)) != "sandbox_ended" {
			t.Errorf("%v", err)
		}
		w.close()
	})
}

// trustPoints are the places at which a hand-over can fail or stand still.
var trustPoints = []string{"trust:before", "trust:after"}

func (w *world) trusted(id sandbox.ID) error {
	_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Shell: "true", Trusted: true}})
	return grpcerr.FromStatus(err)
}

// A hand-over that failed is made again with the next trusted command; nobody else notices.
func TestTrustThatFailsIsRepeated(t *testing.T) {
	for _, point := range trustPoints {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, func(o *Options) { o.Tools = fakeTools{} })
			id := w.create()
			restore, hits := w.arm(point + ":error")
			if err := w.trusted(id); err == nil || hits() != 1 {
				t.Errorf("%s: %v after %d hits", point, err, hits())
			}
			if r, err := w.exec(id, "true", -1); err != nil || r.ExitCode != 0 {
				t.Errorf("%s: another command: %v %v", point, r, err)
			}
			restore()
			if err := w.trusted(id); err != nil {
				t.Errorf("%s: the next one: %v", point, err)
			}
			if n := len(w.guest(id).trusts); n != 1 {
				t.Errorf("%s: %d hand-overs", point, n)
			}
			w.close()
		})
	}
}

// A delete does not wait for a hand-over that stands still, whether that looks at its context (block) or not (hang), and what
// that has made meanwhile is removed.
func TestDeleteWhileTrustStandsStill(t *testing.T) {
	for _, point := range trustPoints {
		for _, action := range []string{"block", "hang"} {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, func(o *Options) { o.Tools = fakeTools{} })
				id := w.create()
				restore, hits := w.arm(point + ":" + action)
				done := make(chan error, 1)
				go func() { done <- w.trusted(id) }()
				synctest.Wait()
				if hits() != 1 {
					t.Fatal("the command never came here")
				}
				w.delete(id, true)
				restore()
				if err := <-done; sandbox.ReasonOf(err) != "sandbox_ended" {
					t.Errorf("%s:%s: %v", point, action, err)
				}
				w.close()
			})
		}
	}
}

// What the sandbox says of user, environment and directory is not a trusted command's.
func TestTrustedCommandsHaveDefaultsOfTheirOwn(t *testing.T) {
	in := &instance{}
	got := in.withDefaults(sandbox.Command{Shell: "true", Trusted: true})
	if got.User != "0:0" || got.Timeout != trustedTimeout || got.Env != nil || got.Cwd != "" {
		t.Errorf("%+v", got)
	}
}

func TestNoTrustedCommandsWithoutTools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := string(w.create())
		_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true", Trusted: true}})
		if e := sandbox.AsError(grpcerr.FromStatus(err)); e.Class != sandbox.Unsupported || e.Reason != "no_trusted_tools" {
			t.Errorf("%v", err)
		}
		if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true"}}); err != nil {
			t.Errorf("another command: %v", err)
		}
		for _, bad := range []*dsecv1.Command{{Argv: []string{"/bin/ls"}}, {Shell: "true", User: "games"}, {Terminal: &dsecv1.Terminal{}}} {
			bad.Trusted = true
			if _, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: id, Command: bad}); sandbox.ReasonOf(grpcerr.FromStatus(err)) != "invalid_command" {
				t.Errorf("%v: %v", bad, err)
			}
		}
		w.close()
	})
}
