package client_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

// hold answers nothing until who asked is gone: what a node does that hangs.
func hold(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
	}
	_, _ = io.Copy(io.Discard, r.Body) // before its end the server does not notice who is gone
	<-r.Context().Done()
}

// Each call ends with its context, and nothing of it is left: neither a goroutine nor a connection.
func TestNothingIsLeftOfACancelledCall(t *testing.T) {
	f := newFake()
	for _, route := range []string{"files", "archive", "ports/{port}/tcp"} {
		f.mux.HandleFunc("/v1/sandboxes/{id}/"+route, hold)
	}
	for _, route := range []string{"PUT /v1/sandboxes/{id}/commands/{cmd}/stdin", "GET /v1/sandboxes/{id}/commands/{cmd}/stdout", "POST /dsec.v1.SandboxService/WatchMetrics", "POST /dsec.v1.SandboxService/ListProcesses"} {
		f.mux.HandleFunc(route, hold)
	}
	c := f.client(t)
	sb := c.Sandbox("held")
	calls := map[string]func(context.Context) error{
		"read": func(ctx context.Context) error {
			_, err := sb.Files("").ReadFile(ctx, "/x")
			return err
		},
		"write": func(ctx context.Context) error {
			return sb.Files("").Write(ctx, "/x", strings.NewReader("x"), 1, client.WriteOptions{})
		},
		"write stream": func(ctx context.Context) error {
			never, _ := io.Pipe()
			_, err := sb.Files("").WriteStream(ctx, "/x", never, client.WriteOptions{})
			return err
		},
		"archive": func(ctx context.Context) error {
			r, err := sb.Files("").ReadArchive(ctx, "/x", false)
			if err == nil {
				_, err = io.ReadAll(r)
				r.Close()
			}
			return err
		},
		"archive of names": func(ctx context.Context) error {
			_, err := sb.Files("").ReadArchiveOf(ctx, "/x")
			return err
		},
		"output": func(ctx context.Context) error {
			out := sb.Command("c").Output(ctx, client.Stdout, client.OutputOptions{Follow: true})
			defer out.Close()
			_, err := io.ReadAll(out)
			return err
		},
		"input": func(ctx context.Context) error {
			_, err := sb.Command("c").Stdin(ctx, 0).Write([]byte("x"))
			return err
		},
		"processes": func(ctx context.Context) error {
			_, err := sb.Processes(ctx)
			return err
		},
		"metrics": func(ctx context.Context) error {
			for _, err := range sb.WatchMetrics(ctx, time.Second) {
				if err != nil {
					return err
				}
			}
			return errors.New("it ended")
		},
		"watch": func(ctx context.Context) error {
			for _, err := range c.Watch(ctx, &dsecv1.WatchSandboxesRequest{}) {
				if err != nil {
					return err
				}
			}
			return errors.New("it ended")
		},
	}
	c.Close()
	before := settled(0)
	for name, call := range calls {
		for range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(20*time.Millisecond, cancel)
			if err := call(ctx); sandbox.ClassOf(err) != sandbox.Canceled {
				t.Errorf("%s: %v", name, err)
			}
			cancel()
		}
		c.Close()
		if after := settled(before); after > before {
			buf := make([]byte, 1<<20)
			t.Fatalf("%s: %d goroutines before, %d after:\n%s", name, before, after, buf[:runtime.Stack(buf, true)])
		}
	}
}

// settled is the number of goroutines, once it has sunk to most or does not sink for a while.
func settled(most int) int {
	n := runtime.NumGoroutine()
	for quiet := 0; n > most && quiet < 200; quiet++ {
		time.Sleep(10 * time.Millisecond)
		if now := runtime.NumGoroutine(); now < n {
			n, quiet = now, 0
		}
	}
	return n
}
