package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/config"
	"dsec/internal/control/store"
	"dsec/internal/linux"
	"dsec/sandbox"
)

func TestNodeFlagsAreChecked(t *testing.T) {
	h := bareHarness(t)
	for _, command := range []string{"up", "edge"} {
		for _, flags := range [][]string{{"--max-sandboxes", "0"}, {"--max-sandboxes", "-1"}, {"--keep-ended", "-1s"}, {"--pool-size", "0"}, {"--log-level", "loud"},
			{"--project-streams", "0"}, {"--project-calls", "-1"}, {"--resolver", "dns.example"}} {
			h.wantError(h.run(append([]string{command}, flags...)...), exitUsage, flags[0])
		}
	}
}

func TestNodeFlagsAreHandedOn(t *testing.T) {
	parse := func(args []string) *nodeFlags {
		var o nodeFlags
		f := newFlagSet("test")
		o.register(f)
		if rest, err := f.parse(args); err != nil || len(rest) > 0 {
			t.Fatal(rest, err)
		}
		f.VisitAll(func(g *flag.Flag) {
			if len(args) > 0 && !slices.Contains(args, "--"+g.Name) {
				t.Errorf("--%s is not handed on", g.Name)
			}
		})
		return &o
	}
	given := parse([]string{"--data-dir", "/d", "--run-dir", "/r", "--max-sandboxes", "7", "--keep-ended", "90s", "--pool-size", "3g", "--log-level", "warn",
		"--network-range", "10.128.0.0/16", "--project-streams", "8", "--project-calls", "9", "--resolver", "10.0.0.2", "--resolver", "[fd12::1]:54"})
	if again := parse(given.args()); !reflect.DeepEqual(again, given) {
		t.Fatalf("%+v became %+v", given, again)
	}
}

// The descriptor's number may be another file's as soon as it was told.
func TestReadinessIsToldOnce(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fd, err := syscall.Dup(int(w.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	report := readinessTo(fd)
	report(readiness{URL: "u"})
	report(readiness{Error: "later"})
	var all bytes.Buffer
	if _, err := all.ReadFrom(r); err != nil { // ends: the descriptor was closed
		t.Fatal(err)
	}
	if got := all.String(); got != `{"url":"u"}`+"\n" {
		t.Fatalf("%q", got)
	}
	readinessTo(0)(readiness{URL: "nobody"})
}

// locked is a platform that this process runs.
func locked(t *testing.T) *platform {
	t.Helper()
	p := &platform{dataDir: t.TempDir(), runDir: filepath.Join(t.TempDir(), "run")}
	release, err := p.lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return p
}

func TestStaleStateIsNotBelieved(t *testing.T) {
	p := locked(t)
	state := upState{PID: os.Getpid(), URL: "http://h"}
	if err := p.writeState(&state); err != nil {
		t.Fatal(err)
	}
	if s, err := p.running(); err != nil || s.URL != "http://h" || s.PID != os.Getpid() {
		t.Fatalf("%+v, %v", s, err)
	}
	// The number belongs to another process by now.
	state.Started--
	b, err := json.Marshal(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.stateFile(), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := p.running(); err != nil || s == nil || s.URL != "" || s.PID != 0 {
		t.Fatalf("of an earlier process: %+v, %v", s, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if s, err := p.awaitRunning(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a start is not waited for: %+v, %v", s, err)
	}
	if started, err := linux.StartTime(os.Getpid()); err != nil || started == 0 {
		t.Fatal(started, err)
	}
}

func TestDownTakesWhatUpHad(t *testing.T) {
	parse := func(args ...string) *downOptions {
		o := &downOptions{flags: newFlagSet("test")}
		o.platform.register(o.flags)
		o.flags.StringVar(&o.contextName, "context", defaultContext, "")
		if _, err := o.flags.parse(args); err != nil {
			t.Fatal(err)
		}
		return o
	}
	last := &upState{RunDir: "/r", Context: "lab"}
	if o := parse(); o.agree(last) != nil || o.runDir != "/r" || o.contextName != "lab" {
		t.Fatalf("%+v", o)
	}
	if o := parse("--run-dir", "/r", "--context", "lab"); o.agree(last) != nil {
		t.Fatalf("%+v", o)
	}
	if o := parse("--run-dir", "/x"); o.agree(&upState{}) != nil || o.runDir != "/x" || o.contextName != defaultContext {
		t.Fatalf("%+v", o)
	}
	var usage *usageError
	for _, args := range [][]string{{"--run-dir", "/x"}, {"--context", "local"}} {
		if err := parse(args...).agree(last); !errors.As(err, &usage) || !strings.Contains(err.Error(), args[0]) {
			t.Fatalf("%v: %v", args, err)
		}
	}
}

func TestOwnContext(t *testing.T) {
	h := bareHarness(t)
	p := platform{dataDir: t.TempDir(), runDir: filepath.Join(t.TempDir(), "run")}
	control, err := openControl(t.Context(), &upOptions{nodeFlags: nodeFlags{platform: p}}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	path, err := control.writeContext(t.Context(), h.c, "mine", "http://mine")
	if err != nil {
		t.Fatal(err)
	}
	control.close()
	for _, c := range []struct {
		name, context string
		last          upState
		foreign       bool // the current context is another platform
		own           bool
		says          string
	}{
		{name: "by its key", context: "mine", own: true},
		{name: "by its URL", context: "moved", last: upState{URL: "http://moved"}, own: true},
		{name: "another platform's", context: "foreign", own: false},
		{name: "none of that name", context: "none", own: false},
		{name: "the current one is another platform", context: "mine", foreign: true, own: true, says: "http://foreign"},
	} {
		if err := config.SetContext(path, "moved", config.Context{URL: "http://moved", APIKey: "dsec_00"}); err != nil {
			t.Fatal(err)
		}
		if err := config.SetContext(path, "foreign", config.Context{URL: "http://foreign", APIKey: "dsec_01"}); err != nil {
			t.Fatal(err)
		}
		if !c.foreign {
			file, err := config.Load(path)
			if err != nil {
				t.Fatal(err)
			}
			file.Current = "mine"
			if err := config.Save(path, file); err != nil {
				t.Fatal(err)
			}
		}
		own, err := (&downOptions{platform: p, contextName: c.context}).ownContext(t.Context(), h.c, &c.last)
		if err != nil || own.path != path || (own.name != "") != c.own || (own.other != "") != (c.says != "") || !strings.Contains(own.other, c.says) {
			t.Errorf("%s: %+v, %v", c.name, own, err)
		}
	}
	if sandbox.ReasonOf(err) != "" {
		t.Fatal(err)
	}
}

// The first services are valid, and defined once: what an administrator removes stays removed.
func TestFirstServices(t *testing.T) {
	rows, err := store.OpenSQLite(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	names := func() (all []string) {
		t.Helper()
		if err := defineServices(t.Context(), rows); err != nil {
			t.Fatal(err)
		}
		list, err := rows.Services(t.Context(), "", 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if err := s.Validate(); err != nil {
				t.Error(err)
			}
			all = append(all, s.Name)
		}
		return all
	}
	if got := names(); strings.Join(got, " ") != "go npm pypi" {
		t.Errorf("%v", got)
	}
	if err := rows.RemoveService(t.Context(), "npm"); err != nil {
		t.Fatal(err)
	}
	if got := names(); strings.Join(got, " ") != "go pypi" {
		t.Errorf("%v", got)
	}
}
