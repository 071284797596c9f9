package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/config"
	"dsec/sandbox"
)

// eachCommand calls do for every command that can be called, with its path.
func eachCommand(table []command, path string, do func(path string, k *command)) {
	for i := range table {
		k := &table[i]
		if k.setup != nil {
			do(path+" "+k.name, k)
		}
		eachCommand(k.sub, path+" "+k.name, do)
	}
}

func TestEveryCommandHelps(t *testing.T) {
	h := bareHarness(t)
	eachCommand(commandTable(), "", func(path string, k *command) {
		got := h.run(append(strings.Fields(path), "--help")...)
		if got.code != 0 || got.stderr != "" || !strings.HasPrefix(got.stdout, "Usage: dsec"+path) {
			t.Errorf("%s --help: %+v", path, got)
		}
		if k.summary == "" || strings.HasSuffix(k.summary, ".") || k.group == "" {
			t.Errorf("%s: the summary must be there and have no full stop, the group must be there", path)
		}
		if again := h.run(append([]string{"help"}, strings.Fields(path)...)...); again.stdout != got.stdout || again.code != 0 {
			t.Errorf("help %s differs from --help: %+v", path, again)
		}
		for _, line := range strings.Split(got.stdout, "\n") {
			if len(line) > 140 {
				t.Errorf("%s --help has a line of %d characters: %s", path, len(line), line)
			}
		}
	})
}

// Every command of users offers JSON and an example.
func TestEveryUserCommandHasJSONAndExample(t *testing.T) {
	eachCommand(commandTable(), "", func(path string, k *command) {
		if path == " edge" || path == " relay" { // `dsec up` calls them, and no user
			return
		}
		f := newFlagSet(path)
		k.setup(f)
		if f.Lookup("json") == nil {
			t.Errorf("%s has no --json", path)
		}
		if len(strings.Fields(path)) == 1 && !strings.Contains(k.details, "\n  dsec ") {
			t.Errorf("%s has no example", path)
		}
	})
}

func TestUsageErrorIsJSONOnly(t *testing.T) {
	h := bareHarness(t)
	for _, args := range [][]string{{"ps", "--json", "extra"}, {"ps", "--nonesuch", "--json"}, {"up", "--json", "--max-sandboxes", "0"}} {
		got := h.run(args...)
		var said struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(got.stderr), &said); err != nil || said.Error.Message == "" || got.code != exitUsage || got.stdout != "" {
			t.Errorf("%v: %+v, %v", args, got, err)
		}
	}
}

func TestJSONOfTheCommandIsNotOurs(t *testing.T) {
	h := newHarness(t)
	got := h.run("run", "debian", "nonesuch", "--json")
	if got.code != exitNotFound || !strings.HasPrefix(got.stderr, "dsec: ") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("run", "--nonesuch", "debian", "true", "--json"); got.code != exitUsage || !strings.HasPrefix(got.stderr, "dsec: ") {
		t.Fatalf("%+v", got)
	}
}

func TestOverview(t *testing.T) {
	h := bareHarness(t)
	for _, args := range [][]string{{"help"}, {"--help"}, {"-h"}} {
		got := h.run(args...)
		if got.code != 0 || !strings.Contains(got.stdout, "\n  run") || !strings.Contains(got.stdout, groupEnvironments) {
			t.Errorf("%v: %+v", args, got)
		}
	}
	h.wantError(h.run(), exitUsage, "Usage: dsec COMMAND", "run")
	h.wantError(h.run("nonesuch"), exitUsage, "no command `dsec nonesuch`")
	h.wantError(h.run("image"), exitUsage, "Usage: dsec image COMMAND", "create")
	h.wantError(h.run("image", "pull"), exitUsage, "no command `dsec image pull`", "dsec image create")
	h.wantError(h.run("image", "nonesuch"), exitUsage, "`dsec image help` lists them")
	for word, hint := range map[string]string{"images": "`dsec image ls`", "stop": "`dsec rm SANDBOX`", "rmi": "`dsec image rm", "pull": "--from-tar"} {
		h.wantError(h.run(word), exitUsage, "no command `dsec "+word+"`", hint)
	}
	for _, flag := range []string{"--version", "-v"} {
		h.want(h.run(flag), "dsec "+version+"\n", "", 0)
	}
	if got := h.run("image", "--help"); got.code != 0 || !strings.Contains(got.stdout, "inspect") {
		t.Errorf("%+v", got)
	}
}

func TestNotConfigured(t *testing.T) {
	h := bareHarness(t)
	h.wantError(h.run("ps"), 1, "no platform is configured", "dsec up")
	h.wantError(h.run("run", "debian", "true"), 125, "dsec up")
	h.wantError(h.run("ps", "--context", "lab"), 1, `no context "lab"`)
}

func TestConfigFileIsUsed(t *testing.T) {
	h := newHarness(t)
	delete(h.vars, "DSEC_URL")
	delete(h.vars, "DSEC_API_KEY")
	path := filepath.Join(h.vars["HOME"], ".config", "dsec", "config.json")
	if err := config.SetContext(path, "lab", config.Context{URL: h.f.server.URL + "/", APIKey: testKey}); err != nil {
		t.Fatal(err)
	}
	if err := config.SetContext(path, "dead", config.Context{URL: "http://127.0.0.1:1", APIKey: testKey}); err != nil {
		t.Fatal(err)
	}
	h.want(h.run("ps", "-q", "--context", "lab"), "", "", 0)
	h.wantError(h.run("ps", "-q"), 1, "nothing listens")
}

func TestUnixSocket(t *testing.T) {
	h := newHarness(t)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h.f.server.Config.Handler}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	h.vars["DSEC_URL"] = "unix://" + socket
	h.want(h.run("run", "debian", "both"), "out\x00\xff", "err\r\n", 3)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
}

// The key must not leave for another host, and must not be shown.
func TestRedirectIsNotFollowed(t *testing.T) {
	h := newHarness(t)
	other := newFakePlatform(t)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, other.server.URL+r.URL.Path, http.StatusTemporaryRedirect)
		return true
	})
	for _, args := range [][]string{{"ps"}, {"cp", string(sandbox.NewID("abcde")) + ":/x", "-"}, {"version"}, {"doctor"}} {
		got := h.run(args...)
		if strings.Contains(got.stdout+got.stderr, testKey) {
			t.Errorf("%v shows the key: %+v", args, got)
		}
	}
	other.mu.Lock()
	defer other.mu.Unlock()
	if len(other.calls) != 0 {
		t.Fatalf("requests went elsewhere: %v", other.calls)
	}
}

func TestVersion(t *testing.T) {
	h := newHarness(t)
	got := h.run("version")
	if got.code != 0 || !strings.Contains(got.stdout, "Client: "+version) || !strings.Contains(got.stdout, "Server: 9.9 at http") {
		t.Fatalf("%+v", got)
	}
	var v versions
	if got := h.run("version", "--json"); json.Unmarshal([]byte(got.stdout), &v) != nil || v.Server.Version != "9.9" || v.Client.Version != version {
		t.Fatalf("%+v", got)
	}
	got = bareHarness(t).run("version")
	if got.code != 0 || !strings.Contains(got.stdout, "Server: none") {
		t.Fatalf("%+v", got)
	}
}

func TestDoctor(t *testing.T) {
	defer func(old []doctorCheck) { doctorChecks = old }(doctorChecks)
	doctorChecks = []doctorCheck{func(context.Context) []finding {
		return []finding{
			{Verdict: verdictWarn, Subject: "quota", Detail: "no simple quotas", Advice: "use a kernel from 6.7 on"},
			{Verdict: verdictOK, Subject: "layers", Detail: "through loops", Instead: "files", Why: "it is old", Cost: "memory"},
		}
	}}
	h := newHarness(t)
	got := h.run("doctor")
	for _, w := range []string{"ok     system", "warn   quota        no simple quotas; use a kernel", "through loops (instead of files: it is old; cost: memory)", "ok     config", "ok     platform     9.9 at ", "ok     node abcde   1 of 100"} {
		if !strings.Contains(got.stdout, w) {
			t.Errorf("no %q in\n%s", w, got.stdout)
		}
	}
	if got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got = h.run("doctor", "--strict"); got.code != 1 {
		t.Errorf("a warning is nothing to --strict: %+v", got)
	}
	h.f.server.Close()
	got = h.run("doctor", "--json")
	var last finding
	lines := strings.Split(strings.TrimSpace(got.stdout), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || last.Verdict != verdictFail || last.Subject != "platform" || got.code != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
}

func TestDoctorLooksAtTheConfig(t *testing.T) {
	path := writeFile(t, "config.json", `{"current":"","contexts":{}}`, 0o644)
	env := func(k string) string { return map[string]string{"DSEC_CONFIG": path}[k] }
	if f := checkConfig(env); f.Verdict != verdictWarn || !strings.Contains(f.Advice, "chmod 600") {
		t.Errorf("open to all: %+v", f)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := checkConfig(env); f.Verdict != verdictOK {
		t.Errorf("good: %+v", f)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if f := checkConfig(env); f.Verdict != verdictFail {
		t.Errorf("broken: %+v", f)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if f := checkConfig(env); f.Verdict != verdictWarn || !strings.Contains(f.Advice, "dsec up") {
		t.Errorf("missing: %+v", f)
	}
	if f := checkSystem("darwin", "arm64"); f.Verdict != verdictWarn {
		t.Errorf("darwin: %+v", f)
	}
}

func TestBrokenPipeIsSilent(t *testing.T) {
	h := newHarness(t)
	listed(h)
	h.c.stdout = &failingWriter{after: 10}
	for _, args := range [][]string{{"ps"}, {"ps", "--json"}, {"ps", "-q"}, {"inspect", "first"}, {"version"}, {"help", "run"}} {
		if got := h.run(args...); got.code != 141 || got.stderr != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestSignals(t *testing.T) {
	c := newConsole(nil, io.Discard, io.Discard, func(string) string { return "" })
	var seconds atomic.Int64
	looked := make(chan struct{}, 8)
	c.now = func() time.Time {
		defer func() { looked <- struct{}{} }()
		return testTime.Add(time.Duration(seconds.Load()) * time.Second)
	}
	codes := make(chan int, 1)
	ctx, stop := watchSignals(t.Context(), c, func(code int) { codes <- code })
	defer stop()
	send := func(s syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGPIPE); err != nil { // must not end the process
		t.Fatal(err)
	}
	send(syscall.SIGTERM)
	recv(t, ctx.Done())
	recv(t, looked)
	send(syscall.SIGTERM) // what timeout(1) sends to the group is the same wish
	recv(t, looked)
	var interrupt *interruptError
	if !errors.As(context.Cause(ctx), &interrupt) || interrupt.signal != syscall.SIGTERM {
		t.Fatalf("cause %v", context.Cause(ctx))
	}
	if code, silent := exitCode(ctx, ctx.Err()); code != 143 || !silent {
		t.Fatalf("exit code %d", code)
	}
	if c.forced.Err() != nil {
		t.Fatal("one signal cuts the clean-up short")
	}
	seconds.Store(1)
	send(syscall.SIGINT)
	recv(t, c.forced.Done())
	seconds.Store(2)
	send(syscall.SIGINT)
	if code := recv(t, codes); code != 130 {
		t.Fatalf("exit code %d", code)
	}
}
