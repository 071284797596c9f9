package hoststate

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDiff(t *testing.T) {
	a := State{{Mount, "/a"}: 1, {Mount, "/b"}: 2, {FD, "3 x"}: 1}
	b := State{{Mount, "/a"}: 2, {Mount, "/b"}: 1, {Process, "7 sh"}: 1}
	want := []string{"+ mount /a", "+ process 7 sh", "- fd 3 x", "- mount /b"}
	if got := Diff(a, b); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := Diff(a, a); len(got) != 0 {
		t.Errorf("a state differs from itself by %q", got)
	}
	only := b.Only(func(i Item) bool { return i.Kind == Mount })
	if len(only) != 2 || len(b) != 3 {
		t.Errorf("Only gives %v of %v", only, b)
	}
}

func TestDescendantsAreSeen(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 100 & wait")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := fmt.Sprint(cmd.Process.Pid)
	for deadline := time.Now().Add(time.Minute); ; {
		all, err := Descendants(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(all, "\n")
		if strings.Contains(text, pid+" sh started") && strings.Contains(text, " sleep started") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("descendants: %s", text)
		}
		time.Sleep(time.Millisecond)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

func TestFilesAndDescriptorsAreSeen(t *testing.T) {
	dir := t.TempDir()
	before := make(State)
	if err := before.addFDs(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	after := make(State)
	if err := after.addFDs(); err != nil {
		t.Fatal(err)
	}
	if err := after.addFiles(dir); err != nil {
		t.Fatal(err)
	}
	diff := Diff(before, after)
	for _, want := range []string{"+ file " + f.Name(), " " + f.Name()} {
		if !slices.ContainsFunc(diff, func(l string) bool { return strings.HasSuffix(l, want) }) {
			t.Errorf("%q has no %q", diff, want)
		}
	}
}
