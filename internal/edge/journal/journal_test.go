package journal

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dsec/internal/edge/driver"
	"dsec/sandbox"
)

const edge = sandbox.EdgeCode("abcde")

func options(t testing.TB, dir string) Options {
	t.Helper()
	return Options{Path: filepath.Join(dir, "journal"), Edge: edge, BootID: "boot-1", Log: slog.New(slog.DiscardHandler)}
}

func open(t testing.TB, o Options) (*Journal, Found) {
	t.Helper()
	j, found, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j, found
}

func must(t testing.TB, j *Journal, recs ...Record) {
	t.Helper()
	for _, r := range recs {
		if err := j.Append(r); err != nil {
			t.Fatal(err)
		}
	}
}

func intent(id sandbox.ID) Record {
	return Record{Op: OpIntent, ID: id, Intent: &Intent{
		Project: "default", Principal: "ada", Key: "k-" + string(id), CreatedAt: time.Unix(1_800_000_000, 0),
		Spec: sandbox.Spec{Image: "python:3", Labels: map[string]string{"run": "7"}}.WithDefaults(), GuestKey: make([]byte, 32),
	}}
}

func running(id sandbox.ID) Record {
	return Record{Op: OpRunning, ID: id, Running: &Running{
		Handle:  driver.Handle{Driver: "container", Version: 1, ID: id, Data: []byte(`{"pid":123,"start":456}`)},
		Cgroups: driver.Cgroups{V2Aether: "/sys/fs/cgroup/x/aether", V2User: "/sys/fs/cgroup/x/user"},
	}}
}

func TestReplay(t *testing.T) {
	dir := t.TempDir()
	j, found := open(t, options(t, dir))
	if len(found.Entries) != 0 || !found.SameBoot || found.Torn {
		t.Fatalf("fresh: %+v", found)
	}
	a, b, c := sandbox.NewID(edge), sandbox.NewID(edge), sandbox.NewID(edge)
	at := time.Unix(1_800_000_777, 0)
	must(t, j, intent(a), running(a), Record{Op: OpActivity, ID: a, At: at.Add(-time.Hour)}, Record{Op: OpActivity, ID: a, At: at},
		intent(b), Record{Op: OpEnding, ID: b, Reason: &Reason{Code: "deleted"}}, Record{Op: OpEnded, ID: b, Reason: &Reason{Code: "deleted"}},
		intent(c), Record{Op: OpForgotten, ID: c}, running(c))
	for round := range 3 { // the second and third read what compaction wrote
		j.Close()
		j, found = open(t, options(t, dir))
		if len(found.Entries) != 2 || found.Torn || !found.SameBoot {
			t.Fatalf("round %d: %+v", round, found)
		}
		ea, eb := found.Entries[a], found.Entries[b]
		if ea.Intent.Spec.Labels["run"] != "7" || ea.Running.Handle.ID != a || string(ea.Running.Handle.Data) != `{"pid":123,"start":456}` || !ea.Activity.Equal(at) {
			t.Errorf("round %d: a: %+v", round, ea)
		}
		if eb.Running != nil || eb.Ended == nil || eb.Ended.Code != "deleted" {
			t.Errorf("round %d: b: %+v", round, eb)
		}
	}
}

func TestEveryCutOfTheTailIsTolerated(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	must(t, j, intent(a))
	whole := j.size
	must(t, j, intent(b))
	j.Close()
	data, err := os.ReadFile(j.o.Path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := whole; cut < int64(len(data)); cut += 7 {
		o := options(t, t.TempDir())
		if err := os.WriteFile(o.Path, data[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, found := open(t, o)
		if found.Entries[a] == nil || found.Entries[b] != nil || found.Torn != (cut != whole) {
			t.Fatalf("cut at %d: %+v", cut, found)
		}
		must(t, j, running(a)) // and what is appended now is read again
		j.Close()
		if _, found = open(t, o); found.Entries[a].Running == nil || found.Torn {
			t.Fatalf("cut at %d, reopened: %+v", cut, found)
		}
	}
}

func TestDamageInTheMiddleEndsTheRead(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	must(t, j, intent(a))
	at := j.size
	must(t, j, intent(b))
	j.Close()
	data, _ := os.ReadFile(j.o.Path)
	data[at+20] ^= 1
	if err := os.WriteFile(j.o.Path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, found := open(t, options(t, dir)); found.Entries[a] == nil || found.Entries[b] != nil || !found.Torn {
		t.Errorf("%+v", found)
	}
}

func TestOtherBootOtherEdge(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	a := sandbox.NewID(edge)
	must(t, j, intent(a))
	j.Close()
	o := options(t, dir)
	o.BootID = "boot-2"
	j, found := open(t, o)
	if found.SameBoot || found.Entries[a] == nil {
		t.Errorf("other boot: %+v", found)
	}
	j.Close()
	o.Edge = "zzzzz"
	if _, found = open(t, o); !found.Discarded || len(found.Entries) != 0 {
		t.Errorf("other edge: %+v", found)
	}
	if _, err := os.Stat(o.Path + ".foreign"); err != nil {
		t.Errorf("not set aside: %v", err)
	}
}

func TestFailedWriteIsReportedAndOverwritten(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	must(t, j, intent(a))
	good := j.file
	broken, err := os.Open(j.o.Path) // read only: every write fails
	if err != nil {
		t.Fatal(err)
	}
	j.file = broken
	if err := j.Append(intent(b)); err == nil {
		t.Fatal("a write that failed was acknowledged")
	}
	if j.broken == nil {
		t.Fatal("the end of the file is unknown and appends go on")
	}
	broken.Close()
	j.file, j.broken = good, nil
	must(t, j, running(a))
	if len(j.failed) != 0 {
		t.Errorf("%d errors are kept", len(j.failed))
	}
	j.Close()
	if _, found := open(t, options(t, dir)); found.Entries[a].Running == nil || found.Torn {
		t.Errorf("%+v", found)
	}
}

func TestCompactionKeepsTheLivingAndBoundsTheFile(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	j.slack = 1 << 20
	keep := sandbox.NewID(edge)
	must(t, j, intent(keep), running(keep))
	big := intent(keep)
	big.Intent.Spec.Env = map[string]string{"BIG": string(bytes.Repeat([]byte("x"), 100<<10))}
	for range 60 { // 6 MB in all
		id := sandbox.NewID(edge)
		big.ID = id
		must(t, j, big, Record{Op: OpForgotten, ID: id}, Record{Op: OpActivity, ID: keep})
	}
	size := func() int64 { j.mu.Lock(); defer j.mu.Unlock(); return j.size }
	for end := time.Now().Add(time.Minute); size() > 4<<20; time.Sleep(time.Millisecond) { // it is compacted beside the appends
		if time.Now().After(end) {
			t.Fatalf("the file has %d bytes", size())
		}
		must(t, j, Record{Op: OpActivity, ID: keep})
	}
	j.Close()
	_, found := open(t, options(t, dir))
	if len(found.Entries) != 1 || found.Entries[keep].Running == nil || found.Entries[keep].Activity.IsZero() {
		t.Errorf("%+v", found)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestConcurrentAppends(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				id := sandbox.NewID(edge)
				if err := j.Append(intent(id)); err != nil {
					t.Error(err)
				}
				if err := j.Append(running(id)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	j.Close()
	_, found := open(t, options(t, dir))
	if len(found.Entries) != 800 {
		t.Fatalf("%d entries", len(found.Entries))
	}
	for id, e := range found.Entries {
		if e.Running == nil {
			t.Errorf("%s: running record lost", id)
		}
	}
	if err := j.Append(intent("x")); err == nil {
		t.Error("append after close")
	}
}

func TestOversizedRecordIsRefused(t *testing.T) {
	j, _ := open(t, options(t, t.TempDir()))
	r := intent(sandbox.NewID(edge))
	r.Intent.Spec.Name = string(bytes.Repeat([]byte("x"), MaxRecord))
	if err := j.Append(r); err == nil {
		t.Error("accepted")
	}
	must(t, j, intent(sandbox.NewID(edge)))
}

func FuzzRead(f *testing.F) {
	good, err := appendFrame(nil, &Record{Op: OpHeader, Header: &Header{Version: 1, Edge: edge}})
	if err != nil {
		f.Fatal(err)
	}
	r := intent("sabcde")
	if good, err = appendFrame(good, &r); err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-3])
	f.Add([]byte{})
	f.Add(binary.LittleEndian.AppendUint32(nil, MaxRecord))
	junk := []byte("not json")
	f.Add(append(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, 8), crc32.Checksum(junk, castagnoli)), junk...))
	f.Fuzz(func(t *testing.T, data []byte) {
		entries := make(map[sandbox.ID]*Entry)
		n, torn, err := read(bytes.NewReader(data), func(r *Record, _ []byte) { apply(entries, r) })
		if err != nil || n > int64(len(data)) || torn != (n < int64(len(data))) {
			t.Fatalf("good %d of %d, torn %v: %v", n, len(data), torn, err)
		}
		for id, e := range entries {
			if e.Intent == nil || id == "" {
				t.Fatalf("entry without intent: %q", id)
			}
		}
		if again, torn, _ := read(bytes.NewReader(data[:n]), func(*Record, []byte) {}); again != n || torn {
			t.Fatalf("the good part reads as %d, torn %v", again, torn)
		}
	})
}

// BenchmarkCreates writes the two records of a create, from 64 goroutines as a batch of creates does.
func BenchmarkCreates(b *testing.B) {
	j, _ := open(b, options(b, b.TempDir()))
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			id := sandbox.NewID(edge)
			r, s := intent(id), running(id)
			if err := j.Append(r); err != nil {
				b.Error(err)
			}
			if err := j.Append(s); err != nil {
				b.Error(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
	b.ReportMetric(float64(j.size)/float64(b.N), "bytes/create")
}

// Creates go on while a compaction reads what may be a large file, and what they wrote meanwhile is in the new one.
func TestAppendsGoOnDuringCompaction(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, options(t, dir))
	j.slack = 1 << 10
	began, goOn := make(chan struct{}), make(chan struct{})
	j.copied = func() { close(began); <-goOn }
	forgotten := sandbox.NewID(edge)
	must(t, j, intent(forgotten))
	for range 200 {
		must(t, j, Record{Op: OpActivity, ID: forgotten})
	}
	<-began
	j.mu.Lock()
	j.slack = 1 << 30 // no other one
	j.mu.Unlock()
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	must(t, j, intent(a), running(a), Record{Op: OpForgotten, ID: forgotten})
	close(goOn)
	must(t, j, intent(b))
	j.Close()
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	_, found := open(t, options(t, dir))
	if len(found.Entries) != 2 || found.Torn || found.Entries[a].Running == nil || found.Entries[b] == nil {
		t.Errorf("%+v", found)
	}
}

func TestWhatAKilledCompactionLeftIsWrittenOver(t *testing.T) {
	o := options(t, t.TempDir())
	if err := os.WriteFile(o.Path+".new", bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	a := sandbox.NewID(edge)
	for range 2 {
		j, _ := open(t, o)
		must(t, j, intent(a))
		j.Close()
		if all, err := os.ReadDir(filepath.Dir(o.Path)); err != nil || len(all) != 1 {
			t.Errorf("%v, %v", all, err)
		}
	}
	if _, found := open(t, o); found.Torn || len(found.Entries) != 1 {
		t.Errorf("%+v", found)
	}
}

// /dev/full stands for a disk without space: the new file cannot be written.
func TestOpensOnAFullDisk(t *testing.T) {
	a, b := sandbox.NewID(edge), sandbox.NewID(edge)
	for _, boot := range []string{"boot-1", "boot-2"} {
		o := options(t, t.TempDir())
		j, _ := open(t, o)
		must(t, j, intent(a), running(a))
		j.Close()
		f, err := os.OpenFile(o.Path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("torn"); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := os.Symlink("/dev/full", o.Path+".new"); err != nil {
			t.Fatal(err)
		}
		o.BootID = boot
		j, found := open(t, o)
		if len(found.Entries) != 1 || found.SameBoot != (boot == "boot-1") {
			t.Errorf("%s: %+v", boot, found)
		}
		must(t, j, intent(b))
		j.Close()
		j, found = open(t, o)
		if found.Torn || !found.SameBoot || found.Entries[b] == nil || (found.Entries[a] != nil) != (boot == "boot-1") {
			t.Errorf("%s, then: %+v", boot, found)
		}
		j.Close()
	}
}
