package edge

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/fake"
	"dsec/internal/edge/failpoint"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// again ends the edge as an orderly restart does, and opens the next one.
func (w *world) again(change ...func(*Options)) {
	w.Helper()
	w.detach()
	for _, f := range change {
		f(&w.o)
	}
	w.open()
}

func TestRestartKeepsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create(key("k", "d"), idle(time.Hour), lifetime(2*time.Hour), func(c *edgev1.CreateSandbox) {
			c.Spec.Labels = map[string]string{"run": "7"}
			c.OwnerEpoch = 9
		})
		epoch := func(n int64) func(*edgev1.CreateSandbox) { return func(c *edgev1.CreateSandbox) { c.OwnerEpoch = n } }
		gone := w.create(epoch(9))
		w.delete(gone, true)
		before := w.get(id)
		time.Sleep(30 * time.Minute)
		w.again()
		after := w.get(id)
		if after.State != ready || after.Spec.Labels["run"] != "7" || !after.ExpiresAt.AsTime().Equal(before.ExpiresAt.AsTime()) ||
			!after.ReadyAt.AsTime().Equal(before.ReadyAt.AsTime()) || len(after.StepSeconds) == 0 {
			t.Errorf("before %v\nafter  %v", before, after)
		}
		if w.create(key("k", "d"), epoch(9)) != id {
			t.Error("the idempotency key is forgotten")
		}
		if _, err := w.tryCreate(epoch(8)); sandbox.ReasonOf(err) != "stale_owner" {
			t.Errorf("the owner's epoch is forgotten: %v", err)
		}
		if r, err := w.exec(id, "echo again", -1); err != nil || string(r.Stdout.Data) != "again\n" {
			t.Errorf("exec: %v %v", r, err)
		}
		if st := w.status(); st.Sandboxes != 1 {
			t.Errorf("%d hold quota", st.Sandboxes)
		}
		time.Sleep(50 * time.Minute)
		w.again()
		time.Sleep(12 * time.Minute) // idle since the exec, with the restart in between and a grain of doubt
		w.expect(id, stopped, sandbox.ReasonIdle)
		w.nothingLeft("after idle")
		w.close()
	})
}

func TestLifetimeContinuesOverRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create(lifetime(time.Hour))
		time.Sleep(50 * time.Minute)
		w.detach()
		time.Sleep(20 * time.Minute) // it runs out while nobody is there
		w.open()
		time.Sleep(time.Second)
		w.expect(id, stopped, sandbox.ReasonLifetime)
		w.close()
	})
}

func TestTerminalRecordIsForgottenOnTimeOverRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		w.delete(id, true)
		time.Sleep(6 * time.Minute)
		w.again()
		w.expect(id, stopped, sandbox.ReasonDeleted)
		time.Sleep(5 * time.Minute)
		if _, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: string(id)}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.NotFound {
			t.Errorf("%v", err)
		}
		w.close()
	})
}

func TestTerminalRecordsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(o *Options) { o.MaxTerminal = 5 })
		var ids []sandbox.ID
		for range 12 {
			id := w.create()
			w.delete(id, true)
			ids = append(ids, id)
		}
		synctest.Wait()
		var kept []string
		for _, r := range w.list(t, stopped) {
			kept = append(kept, r.Sandbox.Id)
		}
		if len(kept) != 5 || !slices.Contains(kept, string(ids[11])) || slices.Contains(kept, string(ids[0])) {
			t.Errorf("kept %v of %v", kept, ids)
		}
		w.close()
	})
}

func TestHostReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		w.again(func(o *Options) { o.BootID = "boot-2" })
		synctest.Wait()
		w.expect(id, failed, sandbox.ReasonHostReset)
		w.nothingLeft("after the reset")
		w.close()
	})
}

func TestDeadWhileAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		dead, unfound, live := w.create(), w.create(), w.create()
		w.detach()
		if err := w.host.Die(dead, driver.Exit{Code: -1}); err != nil {
			t.Fatal(err)
		}
		w.host.On("driver.Recover", func(_ context.Context, id sandbox.ID) error {
			if id == unfound {
				return errBoom
			}
			return nil
		})
		w.open()
		synctest.Wait()
		w.expect(dead, failed, sandbox.ReasonKilled)
		w.expect(unfound, failed, sandbox.ReasonGuestDied)
		w.expect(live, ready, "")
		if n := w.status().Sandboxes; n != 1 {
			t.Errorf("%d hold quota", n)
		}
		w.close()
	})
}

func TestSweepRemovesStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		live := w.create()
		w.detach()
		ctx, stray := context.Background(), sandbox.NewID(testEdge)
		if _, err := w.host.Uppers().Create(ctx, stray, 1); err != nil {
			t.Fatal(err)
		}
		h, err := w.host.Driver().Create(ctx, driver.Spec{ID: stray})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.host.Driver().Start(ctx, h); err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(w.dir, "output", string(stray))
		if err := os.MkdirAll(out, 0o700); err != nil {
			t.Fatal(err)
		}
		w.open()
		for _, o := range w.host.Objects() {
			if !strings.HasSuffix(o, string(live)) {
				t.Errorf("left: %s", o)
			}
		}
		if _, err := os.Stat(out); !os.IsNotExist(err) {
			t.Errorf("kept output of a stranger: %v", err)
		}
		w.close()
	})
}

func TestNothingServesBeforeRecoverAndAfterDetach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		w.detach()
		check := func(want string) {
			t.Helper()
			_, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: string(id)})
			if e := sandbox.AsError(grpcerr.FromStatus(err)); e == nil || e.Class != sandbox.Unavailable || e.Reason != want {
				t.Errorf("%v; want %s", err, want)
			}
		}
		check("edge_stopping")
		e, err := New(w.o)
		if err != nil {
			t.Fatal(err)
		}
		w.e, w.s = e, &server{e: e}
		check("edge_recovering")
		if err := e.Recover(context.Background()); err != nil {
			t.Fatal(err)
		}
		w.expect(id, ready, "")
		w.close()
	})
}

func TestDetachEndsWhatIsHalfMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		live := w.create()
		w.arm("guest:before:block")
		c := w.spec()
		done := make(chan struct{})
		go func() { defer close(done); _, _ = w.createAll(w.user(), c) }()
		synctest.Wait()
		w.again()
		<-done
		w.expect(sandbox.ID(c.Id), failed, sandbox.ReasonInterrupted)
		w.expect(live, ready, "")
		w.close()
	})
}

func TestShutdownThatCannotSaysWhatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		restore, _ := w.arm("limits.teardown:before:error")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := w.e.Shutdown(ctx); err == nil || !strings.Contains(err.Error(), string(id)) {
			t.Errorf("%v", err)
		}
		restore()
		w.open()
		synctest.Wait()
		w.expect(id, stopped, sandbox.ReasonNodeStopped)
		w.close()
	})
}

// TestMain is also the edge that is killed: see TestKillAtEveryFailpoint.
func TestMain(m *testing.M) {
	if dir := os.Getenv("EDGE_TEST_VICTIM"); dir != "" {
		os.Exit(victim(dir))
	}
	os.Exit(m.Run())
}

// victim makes and deletes sandboxes and says what it was told, until it is killed. It ends with 0 if nothing killed it.
func victim(dir string) int {
	tb := &victimTB{}
	w := openWorld(tb, filepath.Join(dir, "data"), fake.OpenHost(filepath.Join(dir, "host")), func(o *Options) {
		o.Retention, o.Lookup = time.Nanosecond, oneAddress
	})
	for i := range 3 {
		c := w.spec()
		fmt.Println("begin", c.Id)
		if all, err := w.createAll(w.user(), c); err == nil && all[c.Id].GetFailure() == nil {
			fmt.Println("ready", c.Id)
		}
		if i == 1 {
			fmt.Println("deleting", c.Id)
			w.delete(sandbox.ID(c.Id), true)
			fmt.Println("deleted", c.Id)
			if in := w.find(sandbox.ID(c.Id)); in != nil { // or its time was over already
				w.e.wake(in.id)
			}
		}
		if i == 0 {
			if _, err := w.setNetwork(sandbox.ID(c.Id), map[string]bool{"reg.example:443": true}); err == nil {
				fmt.Println("opened", c.Id)
			}
		}
		if i == 2 { // an activity that is worth a record
			in := w.find(sandbox.ID(c.Id))
			in.recorded.Store(0)
			w.e.touch(in)
		}
	}
	if strings.HasPrefix(os.Getenv(failpoint.Env), "journal.forgotten:") { // which happens in the background
		time.Sleep(time.Minute)
	}
	return 0
}

// find is what the index has of a sandbox, or nil.
func (w *world) find(id sandbox.ID) *instance {
	for _, in := range w.e.index.all() {
		if in.id == id {
			return in
		}
	}
	return nil
}

// victimTB ends the process where a test would fail.
type victimTB struct{ testing.TB }

func (*victimTB) Helper()        {}
func (*victimTB) Cleanup(func()) {}
func (*victimTB) Fatal(a ...any) { fmt.Println(a...); os.Exit(3) }
func (*victimTB) Fatalf(f string, a ...any) {
	fmt.Printf(f+"\n", a...)
	os.Exit(3)
}
func (v *victimTB) Errorf(f string, a ...any) { v.Fatalf(f, a...) }

// An edge that is killed at any failpoint leaves what the next one can set right: every sandbox that was acknowledged and
// not deleted lives on, everything else is gone.
func TestKillAtEveryFailpoint(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range append(failpoint.List(), "") {
		if strings.HasPrefix(point, "trust:") { // of trusted commands, which the victim has none of
			continue
		}
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(self)
			cmd.Env = append(os.Environ(), "EDGE_TEST_VICTIM="+dir, failpoint.Env+"="+point)
			var complaints strings.Builder // of the race detector, for example
			cmd.Stderr = &complaints
			out, err := cmd.Output()
			if cmd.ProcessState.ExitCode() > 0 || (point == "") != (err == nil) {
				t.Fatalf("the victim: %v\n%s%s", err, out, complaints.String())
			}
			afterKill(t, dir, string(out))
		})
	}
}

func afterKill(t *testing.T, dir, said string) {
	opened := sandbox.ID("")
	begun, told := make(map[sandbox.ID]bool), make(map[sandbox.ID]string)
	for sc := bufio.NewScanner(strings.NewReader(said)); sc.Scan(); {
		what, id, _ := strings.Cut(sc.Text(), " ")
		if begun[sandbox.ID(id)] = true; what == "opened" {
			opened = sandbox.ID(id)
		} else if what != "begin" {
			told[sandbox.ID(id)] = what
		}
	}
	host := fake.OpenHost(filepath.Join(dir, "host"))
	w := openWorld(t, filepath.Join(dir, "data"), host, func(o *Options) { o.Lookup = oneAddress })
	for _, in := range w.e.index.all() {
		if s := in.snapshot().life.state; s != sandbox.Ready && !s.Terminal() {
			<-in.gone
		}
	}
	live := make(map[sandbox.ID]bool)
	for _, r := range w.list(t, ready) {
		live[sandbox.ID(r.Sandbox.Id)] = true
	}
	for id := range live {
		asked, policy, hosts := w.get(id).Spec.NetworkRules, host.Policy(id), host.HostsOf(id)
		if len(asked) != len(policy.Open) || (len(asked) > 0) != (hosts != "") || (id == opened && len(asked) == 0) {
			t.Errorf("%s has the rules %v, the policy %v and the names %q", id, asked, policy, hosts)
		}
	}
	for id := range begun {
		switch told[id] {
		case "ready":
			if !live[id] {
				t.Errorf("%s was acknowledged and is lost", id)
			}
		case "deleted":
			if live[id] {
				t.Errorf("%s was deleted and lives", id)
			}
		}
	}
	for _, o := range host.Objects() {
		if _, id, _ := strings.Cut(o, "/"); !live[sandbox.ID(id)] {
			t.Errorf("left on the host: %s", o)
		}
	}
	for id := range live {
		if r, err := w.exec(id, "true", -1); err != nil || r.ExitCode != 0 {
			t.Errorf("exec in %s: %v %v", id, r, err)
		}
	}
	if n := w.status().Sandboxes; n != int64(len(live)) {
		t.Errorf("%d hold quota, %d live", n, len(live))
	}
	w.close()
}
