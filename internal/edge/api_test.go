package edge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/metadata"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func TestIdempotency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		first := w.create(key("k", "d1"))
		if again := w.create(key("k", "d1")); again != first {
			t.Errorf("a retry made %s beside %s", again, first)
		}
		if _, err := w.tryCreate(key("k", "d2")); sandbox.ClassOf(err) != sandbox.AlreadyExists || sandbox.ReasonOf(err) != "idempotency_key_reused" {
			t.Errorf("other parameters: %v", err)
		}
		other := w.spec(key("k", "d2"))
		other.Grant = w.grant("other", grant.RoleUser)
		if r, err := w.createAll(w.user(), other); err != nil || r[other.Id].GetFailure() != nil {
			t.Errorf("another project's key: %v %v", r, err)
		}
		if n := w.status().Sandboxes; n != 2 {
			t.Errorf("%d sandboxes", n)
		}
		w.delete(first, false) // wanted gone is enough
		if again := w.create(key("k", "d2")); again == first {
			t.Error("the key of a deleted sandbox is not free")
		}
		short := w.create(key("idle", "d"), idle(time.Second))
		time.Sleep(2 * time.Second)
		if again := w.create(key("idle", "d")); again != short {
			t.Error("a retry of a create that succeeded made a second sandbox")
		}
		w.expect(short, stopped, sandbox.ReasonIdle)
		w.close()
	})
}

// Two callers with one key: one create, and it lives as long as one of them waits for it.
func TestJoinedCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		restore, _ := w.arm("network:before:block")
		ctx, cancel := context.WithCancel(w.user())
		firstDone := make(chan struct{})
		go func() {
			defer close(firstDone)
			_, _ = w.createAll(ctx, w.spec(key("k", "d")))
		}()
		synctest.Wait()
		second := make(chan error, 1)
		go func() {
			_, err := w.tryCreate(key("k", "d"))
			second <- err
		}()
		synctest.Wait()
		if n := w.status().Sandboxes; n != 1 {
			t.Errorf("%d sandboxes", n)
		}
		cancel()
		<-firstDone
		restore()
		if err := <-second; err != nil {
			t.Errorf("the second caller: %v", err)
		}
		if n := len(w.list(t, ready)); n != 1 {
			t.Errorf("%d ready", n)
		}
		w.close()
	})
}

// The last caller has left, and what it waited for is about to be ended: who comes now gets a new one.
func TestNobodyJoinsWhatIsBeingUndone(t *testing.T) {
	w := newWorld(t)
	restore, hits := w.arm("network:before:block")
	ctx, cancel := context.WithCancel(w.user())
	first := w.spec(key("k", "d"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = w.createAll(ctx, first)
	}()
	eventually(t, "it is being made", func() bool { return hits() > 0 })
	in, err := w.e.index.lookup(sandbox.ID(first.Id), "default")
	if err != nil {
		t.Fatal(err)
	}
	in.events.Lock() // its end cannot begin
	cancel()
	eventually(t, "its caller has left", func() bool { in.mu.Lock(); defer in.mu.Unlock(); return in.callers == 0 })
	var second *edgev1.CreateResult
	joined := make(chan struct{})
	go func() {
		defer close(joined)
		second, err = w.tryCreate(key("k", "d"))
	}()
	eventually(t, "the second caller waits", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.callers > 0 || len(w.e.index.all()) == 2
	})
	in.events.Unlock()
	<-done
	restore()
	<-joined
	if err != nil || second.Id == first.Id {
		t.Errorf("the second caller: %v %v", second, err)
	}
	w.close()
}

func TestVanishedCallerIsRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.arm("network:before:delay=1s")
		ctx, cancel := context.WithCancel(w.user())
		creates := []*edgev1.CreateSandbox{w.spec(), w.spec(), w.spec()}
		go func() { time.Sleep(500 * time.Millisecond); cancel() }()
		_, err := w.createAll(ctx, creates...)
		if err == nil {
			t.Error("a stream without a caller ended well")
		}
		time.Sleep(time.Second)
		w.nothingLeft("after its caller went away")
		for _, c := range creates {
			w.expect(sandbox.ID(c.Id), stopped, sandbox.ReasonCanceled)
		}
		w.close()
	})
}

func TestBrokenStreamRollsBackWhatWasNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(o *Options) { o.Parallel = 1 })
		var told []string
		creates := []*edgev1.CreateSandbox{w.spec(), w.spec(), w.spec(), w.spec()}
		err := w.s.CreateSandboxes(&edgev1.CreateSandboxesRequest{Creates: creates}, &stream{ctx: w.user(), send: func(r *edgev1.CreateResult) error {
			if len(told) == 2 {
				return errBoom
			}
			told = append(told, r.Id)
			return nil
		}})
		if !errors.Is(err, errBoom) {
			t.Errorf("%v", err)
		}
		time.Sleep(time.Second)
		var live []string
		for _, r := range w.list(t, ready) {
			live = append(live, r.Sandbox.Id)
		}
		if len(live) != 2 || !strings.Contains(strings.Join(told, " "), live[0]) || !strings.Contains(strings.Join(told, " "), live[1]) {
			t.Errorf("told %v, live %v", told, live)
		}
		w.close()
	})
}

func TestAdmission(t *testing.T) {
	room := func(f func(*HostSample)) func(*Options) {
		return func(o *Options) { h := roomyHost(); f(&h.s); o.Host = h }
	}
	for what, change := range map[string]func(*Options){
		"sandboxes":    func(o *Options) { o.Admission.MaxSandboxes = 3 },
		"memory_bytes": room(func(s *HostSample) { s.MemoryAvailable = s.MemoryTotal/20 + 3*expectMemory }),
		"tasks":        room(func(s *HostSample) { s.Tasks = s.TasksMax - s.TasksMax/50 - 3*expectTasks }),
		"files":        room(func(s *HostSample) { s.FilesMax, s.Files = 20000, 19000-3*expectFiles }),
		"mounts":       room(func(s *HostSample) { s.MountsMax, s.Mounts = 1000, 950-3*expectMounts }),
		"disk_bytes":   func(o *Options) { o.Admission.DiskReserve = 100<<30 - 3*expectDisk },
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, change)
				var ids []sandbox.ID
				for range 3 {
					ids = append(ids, w.create())
				}
				r, err := w.tryCreate()
				var se *sandbox.Error
				if !errors.As(err, &se) || se.Class != sandbox.ResourceExhausted || se.Reason != "node_full" || !r.RetryElsewhere || se.Facts["short"] != what {
					t.Fatalf("%v %+v", r, se)
				}
				if _, err := w.s.GetSandbox(w.user(), &edgev1.GetSandboxRequest{Id: r.Id}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.NotFound {
					t.Errorf("a refused create left a record: %v", err)
				}
				if st := w.status(); st.Accepting || st.RefusingReason == "" || st.Sandboxes != 3 || st.SandboxesByProject["default"] != 3 {
					t.Errorf("status: %v", st)
				}
				w.delete(ids[0], true)
				if what == "sandboxes" { // the others are measured, and the fake machine does not change
					w.create()
				}
				w.close()
			})
		})
	}
}

// Room is free when a sandbox shall be gone, not when its teardown is done.
func TestMountsNearTheirLimitAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := roomyHost()
		host.s.MountsMax = 1000
		var log bytes.Buffer
		w := newWorld(t, func(o *Options) { o.Host, o.Log = host, slog.New(slog.NewTextHandler(&log, nil)) })
		for _, c := range []struct {
			mounts, warnings int
			told             bool
		}{{800, 0, false}, {801, 1, true}, {900, 1, true}, {760, 1, true}, {801, 1, true}, {700, 1, false}, {801, 2, true}} {
			host.mu.Lock()
			host.s.Mounts = int64(c.mounts)
			host.mu.Unlock()
			time.Sleep(time.Second)
			st := w.status()
			if got := strings.Count(log.String(), "come near their limit"); got != c.warnings {
				t.Errorf("%d mounts: %d warnings, want %d", c.mounts, got, c.warnings)
			}
			if !st.Accepting || strings.Contains(st.RefusingReason, "fs.mount-max") != c.told {
				t.Errorf("%d mounts: %v", c.mounts, st)
			}
		}
		w.close()
	})
}

func TestQuotaIsFreeAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(o *Options) { o.Admission.MaxSandboxes = 1 })
		id := w.create()
		restore, _ := w.arm("limits.teardown:before:error")
		w.delete(id, false)
		synctest.Wait()
		w.expect(id, stopping, sandbox.ReasonDeleted)
		w.create()
		restore()
		time.Sleep(time.Minute)
		w.close()
	})
}

func TestForeignAndUnknownAnswerAlike(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		mine := string(w.create())
		stranger := w.as("other", grant.RoleUser)
		for name, call := range map[string]func(ctx context.Context, id string) error{
			"Get": func(ctx context.Context, id string) error {
				_, err := w.s.GetSandbox(ctx, &edgev1.GetSandboxRequest{Id: id})
				return err
			},
			"Delete": func(ctx context.Context, id string) error {
				_, err := w.s.DeleteSandbox(ctx, &edgev1.DeleteSandboxRequest{Id: id})
				return err
			},
			"Exec": func(ctx context.Context, id string) error {
				_, err := w.s.Exec(ctx, &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true"}})
				return err
			},
			"GetCommand": func(ctx context.Context, id string) error {
				_, err := w.s.GetCommand(ctx, &dsecv1.GetCommandRequest{SandboxId: id, CommandId: "c"})
				return err
			},
			"ListCommands": func(ctx context.Context, id string) error {
				_, err := w.s.ListCommands(ctx, &dsecv1.ListCommandsRequest{SandboxId: id})
				return err
			},
			"KillCommand": func(ctx context.Context, id string) error {
				_, err := w.s.KillCommand(ctx, &dsecv1.KillCommandRequest{SandboxId: id, CommandId: "c"})
				return err
			},
		} {
			unknown := string(sandbox.NewID(testEdge))
			foreign, missing := call(stranger, mine), call(stranger, unknown)
			if sandbox.ClassOf(grpcerr.FromStatus(foreign)) != sandbox.NotFound ||
				strings.ReplaceAll(foreign.Error(), mine, "ID") != strings.ReplaceAll(missing.Error(), unknown, "ID") {
				t.Errorf("%s: foreign %q, unknown %q", name, foreign, missing)
			}
			if err := call(context.Background(), mine); sandbox.ReasonOf(grpcerr.FromStatus(err)) != "grant_missing" {
				t.Errorf("%s without a grant: %v", name, err)
			}
			if err := call(w.watcher(), mine); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.PermissionDenied {
				t.Errorf("%s by a watcher: %v", name, err)
			}
			garbage := metadata.NewIncomingContext(context.Background(), metadata.Pairs(grant.MetadataKey, "AAAA"))
			if err := call(garbage, mine); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.Unauthenticated {
				t.Errorf("%s with garbage: %v", name, err)
			}
		}
		w.expect(sandbox.ID(mine), ready, "")
		if _, err := w.s.GetStatus(w.user(), &edgev1.GetStatusRequest{}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.PermissionDenied {
			t.Errorf("GetStatus by a user: %v", err)
		}
		w.close()
	})
}

func TestList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		label := func(v string) func(*edgev1.CreateSandbox) {
			return func(c *edgev1.CreateSandbox) { c.Spec.Labels = map[string]string{"run": v} }
		}
		ids := make(map[string]bool)
		for i := range 10 {
			ids[string(w.create(label(fmt.Sprint(i%2))))] = true
		}
		gone := w.create(label("0"))
		w.delete(gone, true)
		other := w.spec()
		other.Grant = w.grant("other", grant.RoleUser)
		if _, err := w.createAll(w.user(), other); err != nil {
			t.Fatal(err)
		}
		seen := make(map[string]bool)
		req := &edgev1.ListSandboxesRequest{PageSize: 3}
		for pages := 0; ; pages++ {
			r, err := w.s.ListSandboxes(w.user(), req)
			if err != nil || pages > 5 {
				t.Fatalf("page %d: %v", pages, err)
			}
			for _, rec := range r.Sandboxes {
				if seen[rec.Sandbox.Id] || !ids[rec.Sandbox.Id] || !rec.HoldsQuota {
					t.Errorf("page %d: %v", pages, rec)
				}
				seen[rec.Sandbox.Id] = true
			}
			if pages == 0 { // coming and going between pages changes nothing of what stays
				w.delete(w.create(), true)
			}
			if req.PageToken = r.NextPageToken; req.PageToken == "" {
				break
			}
		}
		if len(seen) != len(ids) {
			t.Errorf("saw %d of %d", len(seen), len(ids))
		}
		if r, err := w.s.ListSandboxes(w.user(), &edgev1.ListSandboxesRequest{Labels: map[string]string{"run": "1"}}); err != nil || len(r.Sandboxes) != 5 {
			t.Errorf("by label: %v %v", r, err)
		}
		if n := len(w.list(t, stopped)); n != 2 {
			t.Errorf("%d stopped", n)
		}
		if r, err := w.s.ListSandboxes(w.watcher(), &edgev1.ListSandboxesRequest{AllProjects: true}); err != nil || len(r.Sandboxes) != 11 {
			t.Errorf("the watcher sees %d: %v", len(r.GetSandboxes()), err)
		}
		for name, bad := range map[string]error{
			"a user asks for all":     second(w.s.ListSandboxes(w.user(), &edgev1.ListSandboxesRequest{AllProjects: true})),
			"a watcher asks for one":  second(w.s.ListSandboxes(w.watcher(), &edgev1.ListSandboxesRequest{})),
			"a page token is garbage": second(w.s.ListSandboxes(w.user(), &edgev1.ListSandboxesRequest{PageToken: "../../etc"})),
		} {
			if c := sandbox.ClassOf(grpcerr.FromStatus(bad)); bad == nil || (c != sandbox.PermissionDenied && c != sandbox.InvalidArgument) {
				t.Errorf("%s: %v", name, bad)
			}
		}
		w.close()
	})
}

func second[T any](_ T, err error) error { return err }

func TestBadCreates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for name, change := range map[string]func(*edgev1.CreateSandbox){
			"id is a path":        func(c *edgev1.CreateSandbox) { c.Id = "../../../etc/passwd/aaa" },
			"id of another edge":  func(c *edgev1.CreateSandbox) { c.Id = string(sandbox.NewID("zzzzz")) },
			"no spec":             func(c *edgev1.CreateSandbox) { c.Spec = nil },
			"memory under 16 MiB": func(c *edgev1.CreateSandbox) { c.Spec.Limits = &dsecv1.Limits{MemoryBytes: 1 << 20} },
			"NaN CPUs":            func(c *edgev1.CreateSandbox) { c.Spec.Limits = &dsecv1.Limits{CpuCores: math.NaN()} },
			"negative idle":       func(c *edgev1.CreateSandbox) { c.Spec.IdleTimeoutSeconds = -5 },
			"overflowing time":    func(c *edgev1.CreateSandbox) { c.Spec.LifetimeSeconds = math.MaxInt64 },
			"no layers":           func(c *edgev1.CreateSandbox) { c.Layers = nil },
			"digest is a path":    func(c *edgev1.CreateSandbox) { c.Layers[0].Metadata.Digest = "sha256:../../etc/passwd" },
			"negative size":       func(c *edgev1.CreateSandbox) { c.Layers[0].Metadata.Size = -1 },
			"too many blobs":      func(c *edgev1.CreateSandbox) { c.Layers[0].Data = make([]*dsecv1.Blob, 17) },
			"huge spec":           func(c *edgev1.CreateSandbox) { c.Spec.Workspace = strings.Repeat("x", maxSpecBytes) },
			"long key":            func(c *edgev1.CreateSandbox) { c.IdempotencyKey = strings.Repeat("x", 1000) },
			"a rule that is True": func(c *edgev1.CreateSandbox) { c.Spec.NetworkRules = map[string]bool{"pip": true} },
			"foreign backend":     func(c *edgev1.CreateSandbox) { c.Spec.Backend = "microvm" },
			"no grant":            func(c *edgev1.CreateSandbox) { c.Grant = "" },
			"watcher's grant":     func(c *edgev1.CreateSandbox) { c.Grant = w.grant("", grant.RoleWatcher) },
		} {
			c := w.spec()
			change(c)
			all, err := w.createAll(w.user(), c)
			if err != nil {
				t.Fatal(err)
			}
			f := all[c.Id].GetFailure()
			if class := sandbox.ClassByName(f.GetCode()); f == nil || class == sandbox.Internal {
				t.Errorf("%s: %v", name, all)
			}
		}
		for _, n := range []int{0, maxBatch + 1} {
			if _, err := w.createAll(w.user(), make([]*edgev1.CreateSandbox, n)...); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.InvalidArgument {
				t.Errorf("batch of %d: %v", n, err)
			}
		}
		same := w.spec()
		if _, err := w.createAll(w.user(), same); err != nil {
			t.Fatal(err)
		}
		same.SpecDigest = "other"
		if all, _ := w.createAll(w.user(), same); all[same.Id].GetFailure().GetInfo().GetReason() != "id_taken" {
			t.Errorf("the same id twice: %v", all)
		}
		w.close()
	})
}

func TestStaleOwnerIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		epoch := func(n int64) func(*edgev1.CreateSandbox) { return func(c *edgev1.CreateSandbox) { c.OwnerEpoch = n } }
		w.create(epoch(7))
		w.create(epoch(7))
		if _, err := w.tryCreate(epoch(6)); sandbox.ReasonOf(err) != "stale_owner" {
			t.Errorf("%v", err)
		}
		w.close()
	})
}
