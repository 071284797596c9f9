//go:build rootful

package linux

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// netnsOfThreads counts the threads of this process by the network namespace they are in.
func netnsOfThreads(t *testing.T) map[string]int {
	t.Helper()
	links, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(links) == 0 {
		t.Fatalf("threads %v, %v", links, err)
	}
	count := make(map[string]int)
	for _, l := range links {
		if ns, err := os.Readlink(l); err == nil {
			count[ns]++
		}
	}
	return count
}

func TestNoThreadStaysInANetworkNamespace(t *testing.T) {
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "ns")
	seen := make(chan string, 1)
	err = CreateNetns(path, func() error {
		ns, err := os.Readlink("/proc/thread-self/ns/net")
		seen <- ns
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for range 2 {
			if err := RemoveNetns(path); err != nil {
				t.Error(err)
			}
		}
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}()
	if ns := <-seen; ns == home {
		t.Error("setup ran in the host's namespace")
	}
	if m, err := FSMagic(path); err != nil || m != MagicNsfs {
		t.Errorf("%s is on file system %x, %v", path, m, err)
	}
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			err := InNetns(path, func() error {
				if ns, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || ns == home {
					t.Errorf("inside is %s, %v", ns, err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// A thread takes a moment to end after its goroutine.
	eventually(t, func() bool { return len(netnsOfThreads(t)) == 1 && netnsOfThreads(t)[home] > 0 })
}

func TestCreateNetnsThatFailsLeavesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ns")
	broken := errors.New("broken")
	if err := CreateNetns(path, func() error { return broken }); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", path, err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CreateNetns(path, func() error { return nil }); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a file that exists: %v", err)
	}
	if err := LinkUp("nosuchlink"); err == nil {
		t.Error("a missing link came up")
	}
}
