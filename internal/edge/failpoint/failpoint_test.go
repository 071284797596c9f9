package failpoint

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

var testPoint = New("test.point")

func TestMain(m *testing.M) {
	if os.Getenv("FAILPOINT_CHILD") != "" {
		_ = testPoint.Before(context.Background())
		_ = testPoint.After(context.Background())
		os.Exit(7)
	}
	os.Exit(m.Run())
}

func set(t *testing.T, spec string) (restore func(), hits func() int64) {
	t.Helper()
	restore, hits, err := Set(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(restore)
	return restore, hits
}

func TestActions(t *testing.T) {
	ctx := context.Background()
	if err := testPoint.Around(ctx, func() error { return nil }); err != nil {
		t.Fatalf("unarmed: %v", err)
	}
	restore, hits := set(t, "test.point:after:error")
	ran := false
	var fe *Error
	if err := testPoint.Around(ctx, func() error { ran = true; return nil }); !errors.As(err, &fe) || !ran || hits() != 1 {
		t.Errorf("error after: %v, ran %v, hits %d", err, ran, hits())
	}
	restore()
	if err := testPoint.After(ctx); err != nil {
		t.Errorf("after restore: %v", err)
	}
	if armed.Load() != 0 {
		t.Errorf("%d still armed", armed.Load())
	}
}

func TestWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _ = set(t, "test.point:before:delay=3s,test.point:after:block")
		start := time.Now()
		if err := testPoint.Before(t.Context()); err != nil || time.Since(start) != 3*time.Second {
			t.Errorf("delay: %v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := testPoint.After(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("block: %v", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		restore, _ := set(t, "test.point:before:hang")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		done := make(chan error, 1)
		go func() { done <- testPoint.Before(ctx) }()
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("hang looked at its context")
		default:
		}
		restore()
		<-done
	})
}

func TestKillIsSIGKILL(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range []string{"test.point:before", "test.point:after:kill"} {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), "FAILPOINT_CHILD=1", Env+"="+spec)
		err := cmd.Run()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Errorf("%s: %v", spec, err)
		}
	}
}

func TestListAndMistakes(t *testing.T) {
	if got := List(); !slices.Contains(got, "test.point:before") || !slices.Contains(got, "test.point:after") {
		t.Errorf("List: %v", got)
	}
	for _, bad := range []string{"x", "x:middle", "nobody:before", "test.point:before:explode", "test.point:before:delay=soon", "test.point:before:error=1"} {
		if _, _, err := Set(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		}
	}
}

func BenchmarkUnarmed(b *testing.B) {
	ctx := context.Background()
	for b.Loop() {
		_ = testPoint.Before(ctx)
	}
}

func TestFromFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "points")
	if err := os.WriteFile(file, []byte("a:before,b:after:hang\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{"a:before": "a:before", "@" + file: "a:before,b:after:hang", "@/no/such/file": "", "": ""} {
		if got := fromEnv(value); got != want {
			t.Errorf("%q gives %q, want %q", value, got, want)
		}
	}
}
