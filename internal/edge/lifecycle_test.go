package edge

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/failpoint"
	"dsec/internal/edge/journal"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const (
	creating = dsecv1.State_STATE_CREATING
	ready    = dsecv1.State_STATE_READY
	stopping = dsecv1.State_STATE_STOPPING
	stopped  = dsecv1.State_STATE_STOPPED
	failed   = dsecv1.State_STATE_FAILED
)

func TestWholeLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		v := w.get(id)
		if v.State != ready || v.Node != string(testEdge) || v.Principal != "ada" || v.Spec.GetLimits().GetPids() != sandbox.DefaultPIDs ||
			v.ReadyAt == nil || v.IdleExpiresAt == nil || v.Generation != 1 {
			t.Errorf("view: %v", v)
		}
		for _, step := range sandboxSteps.Names() {
			if _, ok := v.StepSeconds[step]; !ok {
				t.Errorf("no time of step %s", step)
			}
		}
		if n := len(w.host.Objects()); n != 6 {
			t.Errorf("a live sandbox has %v", w.host.Objects())
		}
		if r, err := w.exec(id, "echo hello", -1); err != nil || string(r.Stdout.Data) != "hello\n" || r.ExitCode != 0 || r.Running {
			t.Errorf("exec: %v %v", r, err)
		}
		w.delete(id, true)
		w.nothingLeft("after delete")
		w.expect(id, stopped, sandbox.ReasonDeleted)
		w.delete(id, true) // idempotent
		if _, err := w.exec(id, "true", -1); sandbox.ReasonOf(err) != "sandbox_ended" {
			t.Errorf("exec in a sandbox that ended: %v", err)
		}
		if n := len(w.list(t, stopped)); n != 1 {
			t.Errorf("%d terminal records", n)
		}
		time.Sleep(defaultRetention + time.Second)
		if _, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: string(id)}); sandbox.ReasonOf(grpcerr.FromStatus(err)) != "sandbox_not_found" {
			t.Errorf("after its retention: %v", err)
		}
		w.close()
	})
}

func (w *world) list(t *testing.T, states ...dsecv1.State) []*edgev1.Record {
	t.Helper()
	r, err := w.s.ListSandboxes(w.user(), &edgev1.ListSandboxesRequest{States: states})
	if err != nil {
		t.Fatal(err)
	}
	return r.Sandboxes
}

// setupPoints are the places where a create can be stopped.
func setupPoints() (out []string) {
	for _, p := range failpoint.List() {
		name, _, _ := strings.Cut(p, ":")
		if strings.HasSuffix(name, ".teardown") {
			continue
		}
		switch name {
		case "journal.ending", "journal.ended", "journal.forgotten", "journal.activity", "trust", "journal.network", "network.policy", "network.hosts":
			continue
		}
		out = append(out, p)
	}
	return out
}

func teardownPoints() (out []string) {
	for _, p := range failpoint.List() {
		if name, _, _ := strings.Cut(p, ":"); strings.HasSuffix(name, ".teardown") {
			out = append(out, p)
		}
	}
	return out
}

func TestThereAreFailpointsEverywhere(t *testing.T) {
	if n, m := len(setupPoints()), len(teardownPoints()); n != 24 || m != 20 {
		t.Errorf("%d setup points %v, %d teardown points", n, setupPoints(), m)
	}
}

// Delete wins whatever step the create is in, whether that looks at its context (block) or not (hang).
func TestDeleteAtEveryStepOfCreate(t *testing.T) {
	for _, point := range setupPoints() {
		for _, action := range []string{"block", "hang"} {
			t.Run(point+":"+action, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t)
					restore, hits := w.arm(point + ":" + action)
					c := w.spec()
					done := make(chan error, 1)
					go func() {
						all, err := w.createAll(w.user(), c)
						if err == nil {
							err = grpcerr.FromFailure(all[c.Id].GetFailure())
						}
						done <- err
					}()
					synctest.Wait()
					if hits() == 0 {
						t.Fatal("the create never came here")
					}
					w.expect(sandbox.ID(c.Id), creating, "")
					start := time.Now()
					w.delete(sandbox.ID(c.Id), true)
					if d := time.Since(start); d > setupGrace+time.Second || (action == "block" && d > time.Second) {
						t.Errorf("delete took %v", d)
					}
					if err := <-done; sandbox.ClassOf(err) != sandbox.Canceled || sandbox.ReasonOf(err) != sandbox.ReasonDeleted {
						t.Errorf("the create was told: %v", err)
					}
					w.expect(sandbox.ID(c.Id), stopped, sandbox.ReasonDeleted)
					w.nothingLeft("after delete")
					if n := w.status().Sandboxes; n != 0 {
						t.Errorf("%d sandboxes hold quota", n)
					}
					restore()
					synctest.Wait()
					time.Sleep(time.Minute) // a setup that hung comes to its end, and what it made since goes
					w.nothingLeft("after the setup came back")
					w.close()
				})
			})
		}
	}
}

func TestFailureAtEveryStepLeavesNothing(t *testing.T) {
	for _, point := range setupPoints() {
		t.Run(point, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				restore, hits := w.arm(point + ":error")
				r, err := w.tryCreate(key("k", "d"))
				if hits() != 1 || sandbox.ReasonOf(err) != sandbox.ReasonStartFailed || r.RetryElsewhere {
					t.Errorf("%d hits; %v", hits(), err)
				}
				w.nothingLeft("when the failure is told")
				w.expect(sandbox.ID(r.Id), failed, sandbox.ReasonStartFailed)
				if n := w.status().Sandboxes; n != 0 {
					t.Errorf("%d sandboxes hold quota", n)
				}
				restore()
				if again := w.create(key("k", "d")); string(again) == r.Id {
					t.Error("a retry got the failed sandbox")
				}
				w.close()
			})
		})
	}
}

func TestFailureOfEachPartLeavesNothing(t *testing.T) {
	for _, call := range []string{"layers.Acquire", "uppers.Create", "networks.Acquire", "cgroups.Create", "driver.Create", "driver.Start"} {
		for _, where := range []string{"", ":after"} {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.host.On(call+where, func(context.Context, sandbox.ID) error {
					return sandbox.Errorf(sandbox.ResourceExhausted, "pool_empty", "the pool is empty")
				})
				if _, err := w.tryCreate(); sandbox.ReasonOf(err) != "pool_empty" || sandbox.ClassOf(err) != sandbox.ResourceExhausted {
					t.Errorf("%s%s: %v", call, where, err)
				}
				w.nothingLeft(call + where)
				w.close()
			})
		}
	}
}

// A teardown that fails anywhere is tried again until it works; the quota is free at once, and the reason says what is
// in the way.
func TestTeardownIsRepeated(t *testing.T) {
	for _, point := range teardownPoints() {
		for _, action := range []string{"error", "hang"} {
			t.Run(point+":"+action, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t)
					id := w.create()
					restore, hits := w.arm(point + ":" + action)
					w.delete(id, false)
					time.Sleep(2 * time.Minute)
					v := w.get(id)
					if v.State != stopping || v.Reason.Code != sandbox.ReasonDeleted || !strings.Contains(v.Reason.Message, "is repeated") || hits() == 0 {
						t.Errorf("%v, %d hits", v, hits())
					}
					if rec := w.list(t, stopping); len(rec) != 1 || rec[0].HoldsQuota || w.status().Sandboxes != 0 {
						t.Errorf("it still holds quota: %v", rec)
					}
					restore()
					time.Sleep(time.Minute)
					w.expect(id, stopped, sandbox.ReasonDeleted)
					w.nothingLeft("at last")
					w.close()
				})
			})
		}
	}
}

func TestCreateDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.arm("network:before:block")
		start := time.Now()
		_, err := w.tryCreate(deadline(3 * time.Second))
		if sandbox.ClassOf(err) != sandbox.DeadlineExceeded || sandbox.ReasonOf(err) != sandbox.ReasonStartTimeout || time.Since(start) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		w.nothingLeft("after the deadline")
		w.close()
	})
}

func TestIdleAndLifetime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create(idle(time.Minute))
		time.Sleep(59 * time.Second)
		w.expect(id, ready, "") // looking does not keep it alive, see below
		if _, err := w.exec(id, "true", -1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Second)
		w.expect(id, ready, "")
		if r, err := w.exec(id, "sleep 10m", 0); err != nil || !r.Running {
			t.Fatalf("%v %v", r, err)
		}
		time.Sleep(9 * time.Minute)
		if v := w.get(id); v.State != ready || v.RunningCommands != 1 || v.IdleExpiresAt != nil {
			t.Errorf("while a command runs: %v", v)
		}
		time.Sleep(time.Minute + 59*time.Second) // 59 s after its end
		w.expect(id, ready, "")
		time.Sleep(2 * time.Second)
		w.expect(id, stopped, sandbox.ReasonIdle)
		w.nothingLeft("after idle")

		id = w.create(idle(time.Minute), lifetime(5*time.Minute))
		for range 5 {
			time.Sleep(59 * time.Second)
			if _, err := w.exec(id, "true", -1); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := w.exec(id, "wait", 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(8 * time.Second)
		w.expect(id, stopped, sandbox.ReasonLifetime) // whatever runs
		w.close()
	})
}

func TestDeathFromOutside(t *testing.T) {
	for name, c := range map[string]struct {
		die    func(w *world, id sandbox.ID)
		reason string
	}{
		"killed": {func(w *world, id sandbox.ID) { _ = w.host.Die(id, driver.Exit{Code: -1, Signal: 9}) }, sandbox.ReasonKilled},
		"exited": {func(w *world, id sandbox.ID) { _ = w.host.Die(id, driver.Exit{Code: 2}) }, sandbox.ReasonGuestDied},
		"oom": {func(w *world, id sandbox.ID) {
			w.host.SetOOM("/fake/cgroup/"+string(id)+"/aether", 1)
			_ = w.host.Die(id, driver.Exit{Code: -1, Signal: 9})
		}, sandbox.ReasonOOM},
		"connection": {func(w *world, id sandbox.ID) { w.guest(id).lose(errBoom, true) }, sandbox.ReasonGuestDied},
		"protocol": {func(w *world, id sandbox.ID) {
			w.guest(id).lose(sandbox.Errorf(sandbox.Internal, "guest_protocol", "it lies"), true)
		}, "guest_protocol"},
		"both": {func(w *world, id sandbox.ID) {
			w.guest(id).lose(errBoom, true)
			_ = w.host.Die(id, driver.Exit{Code: -1, Signal: 9})
		}, sandbox.ReasonKilled}, // the process's verdict knows more
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				id := w.create()
				waiting := make(chan *dsecv1.CommandResult, 1)
				go func() {
					r, _ := w.exec(id, "wait", -1)
					waiting <- r
				}()
				synctest.Wait()
				c.die(w, id)
				time.Sleep(3 * time.Second)
				w.expect(id, failed, c.reason)
				w.nothingLeft("after its death")
				if r := <-waiting; r == nil || !r.Killed {
					t.Errorf("the one who waited for a command was told %v", r)
				}
				w.close()
			})
		})
	}
}

func TestDeathWhileStarting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.o.Guests = nil
		w.e.o.Guests = func(ctx context.Context, o GuestOptions) (Guest, error) {
			_ = w.host.Die(o.ID, driver.Exit{Code: 1})
			<-ctx.Done() // nobody will ever answer
			return nil, ctx.Err()
		}
		start := time.Now()
		if _, err := w.tryCreate(); sandbox.ReasonOf(err) != sandbox.ReasonGuestDied || time.Since(start) > time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		w.nothingLeft("after its death")
		w.close()
	})
}

func TestShutdownEndsAllAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for range 50 {
			w.create()
		}
		w.host.On("driver.Stop", func(context.Context, sandbox.ID) error { time.Sleep(time.Second); return nil })
		start := time.Now()
		w.close()
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("took %v: one after the other", d)
		}
	})
}

// Processes that are left in a sandbox's control groups are in its network slot too: others get it when they are gone.
func TestNetworkSlotWaitsForTheControlGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		w.host.On("cgroups.Remove", boom)
		w.delete(id, false)
		time.Sleep(time.Minute)
		if left := w.host.Objects(); !slices.Contains(left, "network/"+string(id)) || slices.Contains(left, "upper/"+string(id)) {
			t.Errorf("while the control groups are busy: %v", left)
		}
		if v := w.get(id); !strings.Contains(v.Reason.Message, "step limits") {
			t.Errorf("%v", v.Reason)
		}
		w.host.On("cgroups.Remove", nil)
		time.Sleep(time.Minute)
		w.nothingLeft("at last")
		w.close()
	})
}

// A create that was let in before Shutdown began, and is entered after Shutdown looked.
func TestNothingIsEnteredOnceShutdownHasBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		late := w.e.newInstance(sandbox.NewID(testEdge), &journal.Intent{Project: "default"}, w.host.Driver())
		defer late.stop()
		w.close()
		if _, err := w.e.index.add(late); sandbox.ReasonOf(err) != reasonFull {
			t.Errorf("it was entered: %v", err)
		}
	})
}
