package linux

import (
	"io"
	"os"
	"strings"
	"sync"
	"testing"
)

// What a program is started with is exactly what was asked for, whatever else is open, by many at once.
func TestSpawnHasItsDescriptorsAlone(t *testing.T) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	var many []*os.File
	for range 300 {
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		many = append(many, f)
	}
	defer func() {
		for _, f := range many {
			f.Close()
		}
	}()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			r, w, err := os.Pipe()
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			files := []int{int(null.Fd()), int(w.Fd()), int(null.Fd()), int(many[299].Fd())}
			pid, err := Spawn{Path: "/bin/sh", Args: []string{"sh", "-c", "echo /proc/$$/fd/*"}, Files: files, Cgroup: -1}.Start()
			w.Close()
			if err != nil {
				t.Error(err)
				return
			}
			out, err := io.ReadAll(r)
			exit, reapErr := Reap(pid)
			if err != nil || reapErr != nil || exit.Code != 0 {
				t.Errorf("read %v, reaped %v: %v", err, reapErr, exit)
			}
			// The shell keeps its own standard output at 10 and above at most.
			for i, path := range strings.Fields(string(out)) {
				if fd := path[strings.LastIndexByte(path, '/')+1:]; len(fd) == 1 && fd != string(rune('0'+i)) || i > 4 {
					t.Errorf("it has %s", out)
				}
			}
		})
	}
	wg.Wait()
}

func TestSpawnOfNothing(t *testing.T) {
	if _, err := (Spawn{Path: "/nonexistent", Args: []string{"x"}, Files: []int{0, 1, 2}, Cgroup: -1}).Start(); err == nil {
		t.Error("a program that does not exist was started")
	}
	if _, err := (Spawn{Path: "/bin/true", Args: []string{"true"}, Files: []int{1 << 20}, Cgroup: -1}).Start(); err == nil {
		t.Error("a program was started with a descriptor that does not exist")
	}
}
