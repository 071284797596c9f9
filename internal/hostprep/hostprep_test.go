package hostprep

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A fakeHost has settings in a directory and modules in a table. It dies when its budget of steps is spent.
type fakeHost struct {
	*Host
	t      *testing.T
	loaded map[string]bool
	budget int // -1: no end
}

var errDied = errors.New("killed")

func newHost(t *testing.T) *fakeHost {
	dir := t.TempDir()
	h := &fakeHost{t: t, loaded: map[string]bool{"overlay": true}, budget: -1}
	h.Host = &Host{Sysctls: filepath.Join(dir, "sys"), Record: filepath.Join(dir, "lib", "record.json"), BootID: "one",
		Run: h.run, Modules: func() (map[string]bool, error) { return maps.Clone(h.loaded), nil }}
	h.reached = func() {
		if h.budget == 0 {
			panic(errDied)
		}
		h.budget--
	}
	for name, v := range map[string]string{"fs.inotify.max_user_instances": "128", "fs.mount-max": "100000", "kernel.pid_max": "4194304", "kernel.pty.max": "4096"} {
		if err := os.MkdirAll(filepath.Dir(h.path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := h.write(name, v); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func (h *fakeHost) run(_ context.Context, name string, args ...string) error {
	line := strings.Join(append([]string{name}, args...), " ")
	switch {
	case strings.HasPrefix(line, "modprobe --dry-run"):
		return nil
	case name == "sh":
		return errors.New("not built in")
	}
	switch {
	case strings.HasPrefix(line, "modprobe --remove "):
		delete(h.loaded, args[1])
	case name == "modprobe":
		h.loaded[args[0]] = true
	case name == "fallocate":
		return os.WriteFile(args[2], nil, 0o600)
	}
	return nil
}

func (h *fakeHost) state() string {
	h.t.Helper()
	var lines []string
	for _, n := range needs {
		v, err := h.read(n.name)
		if err != nil {
			h.t.Fatal(err)
		}
		lines = append(lines, n.name+"="+v)
	}
	lines = append(lines, fmt.Sprint(slices.Sorted(maps.Keys(h.loaded))))
	if _, err := os.Stat(h.swap()); err == nil {
		lines = append(lines, "swap")
	}
	return strings.Join(lines, "\n")
}

func (h *fakeHost) swap() string { return filepath.Join(filepath.Dir(h.Sysctls), "swapfile") }

func (h *fakeHost) prepare() ([]Change, error) {
	return h.Prepare(h.t.Context(), Options{SwapFile: h.swap(), SwapBytes: 1 << 20})
}

func (h *fakeHost) restore() []Change {
	h.t.Helper()
	done, err := h.Restore(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	if _, err := os.Stat(h.Record); !errors.Is(err, os.ErrNotExist) {
		h.t.Errorf("the record is left: %v", err)
	}
	return done
}

func TestRestoreBringsBackWhatWas(t *testing.T) {
	h := newHost(t)
	before := h.state()
	plan, err := h.Plan(t.Context(), Options{SwapFile: h.swap(), SwapBytes: 1 << 20})
	if err != nil || h.state() != before {
		t.Fatalf("a plan changes something, or fails: %v\n%s", err, h.state())
	}
	done, err := h.prepare()
	if err != nil || len(done) != len(plan) || len(done) != 3+len(modules)-1+1 {
		t.Fatalf("planned %d, done %v, %v", len(plan), done, err)
	}
	if v, _ := h.read("fs.mount-max"); v != "1000000" || !h.loaded["erofs"] {
		t.Errorf("after Prepare:\n%s", h.state())
	}
	if again, err := h.prepare(); err != nil || len(again) != 0 {
		t.Errorf("a second time changes %v, %v", again, err)
	}
	if back := h.restore(); len(back) != len(done) || h.state() != before {
		t.Errorf("%v\nbefore:\n%s\nafter:\n%s", back, before, h.state())
	}
	if back := h.restore(); len(back) != 0 {
		t.Errorf("a second time restores %v", back)
	}
}

// Whenever it is killed, what was comes back; also if the way back is cut off as well.
func TestKilledAtEveryStep(t *testing.T) {
	ends := false
	for steps := 0; !ends; steps++ {
		if steps > 1000 {
			t.Fatal("it never ends")
		}
		h := newHost(t)
		before := h.state()
		ends = !h.killedAfter(steps, func() error { _, err := h.prepare(); return err })
		for back := steps % 7; h.killedAfter(back, func() error { _, err := h.Restore(t.Context()); return err }); back++ {
			continue
		}
		if h.budget = -1; len(h.restore()) != 0 || h.state() != before {
			t.Errorf("killed after %d steps:\n%s\nwant\n%s", steps, h.state(), before)
		}
	}
}

// killedAfter runs something that ends in the middle, as a kill does, after so many steps, and reports whether it came to that.
func (h *fakeHost) killedAfter(steps int, do func() error) (killed bool) {
	h.t.Helper()
	defer func() {
		if r := recover(); r != nil {
			if r != errDied {
				panic(r)
			}
			killed = true
		}
	}()
	h.budget = steps
	if err := do(); err != nil {
		h.t.Fatal(err)
	}
	return false
}

func TestWhatOthersSetIsTheirs(t *testing.T) {
	h := newHost(t)
	if _, err := h.prepare(); err != nil {
		t.Fatal(err)
	}
	if err := h.write("kernel.pty.max", "77777"); err != nil {
		t.Fatal(err)
	}
	left := 0
	for _, c := range h.restore() {
		if c.Left != "" {
			left++
			if c.Name != "kernel.pty.max" || !strings.Contains(c.Left, "77777") {
				t.Errorf("%+v", c)
			}
		}
	}
	if v, _ := h.read("kernel.pty.max"); left != 1 || v != "77777" {
		t.Errorf("%d left, and it is %s", left, v)
	}
}

// A reset has undone settings and modules, and what is set now is of the new boot.
func TestAfterAResetOnlyTheFileIsUndone(t *testing.T) {
	h := newHost(t)
	if _, err := h.prepare(); err != nil {
		t.Fatal(err)
	}
	h.BootID = "two"
	set := h.state()
	back := h.restore()
	if len(back) != 1 || back[0].Kind != kindSwap || h.state() != strings.TrimSuffix(set, "\nswap") {
		t.Errorf("restored %v:\n%s", back, h.state())
	}
}

func TestADamagedRecordIsNotOverwritten(t *testing.T) {
	h := newHost(t)
	if _, err := h.prepare(); err != nil {
		t.Fatal(err)
	}
	for _, content := range []string{"", "{", `{"version":9}`} {
		if err := os.WriteFile(h.Record, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := h.prepare(); err == nil {
			t.Errorf("prepared over %q", content)
		}
		if _, err := h.Restore(t.Context()); err == nil {
			t.Errorf("restored from %q", content)
		}
		if b, _ := os.ReadFile(h.Record); string(b) != content {
			t.Errorf("%q became %q", content, b)
		}
	}
}

func TestASwapFileThatIsThereIsNotTaken(t *testing.T) {
	h := newHost(t)
	if err := os.WriteFile(h.swap(), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := h.prepare(); err == nil {
		t.Error("somebody's file was taken for swap")
	}
	h.restore()
	if b, _ := os.ReadFile(h.swap()); string(b) != "mine" {
		t.Errorf("the file is now %q", b)
	}
}
