package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// An outcome is what one run of dsec showed.
type outcome struct {
	stdout, stderr string
	code           int
}

// A buffer may be read while a command writes to it.
type buffer struct {
	mu   sync.Mutex
	b    bytes.Buffer
	wait string
	hit  chan struct{}
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, err := b.b.Write(p)
	if b.hit != nil && strings.Contains(b.b.String(), b.wait) {
		close(b.hit)
		b.hit = nil
	}
	return n, err
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// saw is closed once text has been written.
func (b *buffer) saw(text string) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	hit := make(chan struct{})
	if strings.Contains(b.b.String(), text) {
		close(hit)
	} else {
		b.wait, b.hit = text, hit
	}
	return hit
}

// A harness runs dsec's commands in this process against a fake platform.
type harness struct {
	t      *testing.T
	f      *fakePlatform
	vars   map[string]string
	stdin  io.Reader
	stdout buffer
	stderr buffer
	ctx    context.Context
	cancel context.CancelCauseFunc
	force  context.CancelFunc
	c      *console

	mu    sync.Mutex
	slept time.Duration
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	h := bareHarness(t)
	h.f = newFakePlatform(t)
	h.vars["DSEC_URL"], h.vars["DSEC_API_KEY"] = h.f.server.URL, testKey
	return h
}

// bareHarness has no platform.
func bareHarness(t *testing.T) *harness {
	h := &harness{t: t, vars: map[string]string{"HOME": t.TempDir()}, stdin: strings.NewReader("")}
	h.ctx, h.cancel = context.WithCancelCause(context.Background())
	forced, force := context.WithCancel(context.Background())
	h.force = force
	t.Cleanup(func() { h.cancel(nil); force() })
	h.c = newConsole(nil, &h.stdout, &h.stderr, func(k string) string { return h.vars[k] })
	h.c.forced = forced
	h.c.now = func() time.Time { return testTime }
	h.c.sleep = func(ctx context.Context, d time.Duration) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.slept += d
		return ctx.Err()
	}
	return h
}

// run runs one command line to its end.
func (h *harness) run(args ...string) outcome {
	h.t.Helper()
	h.c.stdin = h.stdin
	h.stdout.b.Reset()
	h.stderr.b.Reset()
	code := execute(h.ctx, h.c, commandTable(), args)
	return outcome{h.stdout.String(), h.stderr.String(), code}
}

// start runs one command line beside the test.
func (h *harness) start(args ...string) <-chan outcome {
	done := make(chan outcome, 1)
	h.c.stdin = h.stdin
	go func() {
		code := execute(h.ctx, h.c, commandTable(), args)
		done <- outcome{h.stdout.String(), h.stderr.String(), code}
	}()
	return done
}

func (h *harness) interrupt() { h.cancel(&interruptError{syscall.SIGINT}) }

// want fails the test unless the outcome is exactly this.
func (h *harness) want(got outcome, stdout, stderr string, code int) {
	h.t.Helper()
	if got.stdout != stdout || got.stderr != stderr || got.code != code {
		h.t.Fatalf("got exit %d\nstdout %q\nstderr %q\nwant exit %d\nstdout %q\nstderr %q", got.code, got.stdout, got.stderr, code, stdout, stderr)
	}
}

// wantError fails the test unless dsec ended with code, said each of the words on stderr and nothing on stdout.
func (h *harness) wantError(got outcome, code int, words ...string) {
	h.t.Helper()
	if got.code != code || got.stdout != "" {
		h.t.Fatalf("got exit %d, stdout %q, stderr %q; want exit %d", got.code, got.stdout, got.stderr, code)
	}
	for _, w := range words {
		if !strings.Contains(got.stderr, w) {
			h.t.Fatalf("stderr %q does not say %q", got.stderr, w)
		}
	}
}

// recv waits for something that must come.
func recv[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(time.Minute):
		t.Fatal("it takes too long")
		panic("unreachable")
	}
}

func writeFile(t *testing.T, name, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}
