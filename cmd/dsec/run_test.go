package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/sandbox"
)

func TestRunPassesBytesAndExitCode(t *testing.T) {
	h := newHarness(t)
	h.want(h.run("run", "debian", "both"), "out\x00\xff", "err\r\n", 3)
	if n := h.f.live(); n != 0 {
		t.Fatalf("%d sandboxes are left", n)
	}
}

func TestRunArgvIsExact(t *testing.T) {
	h := newHarness(t)
	got := h.run("run", "debian", "echo", "-n", "--json", "", "a b", "--", "$HOME")
	h.want(got, "-n --json  a b -- $HOME\n", "", 0)
	want := []string{"echo", "-n", "--json", "", "a b", "--", "$HOME"}
	if argv := h.f.execs[0].Argv; strings.Join(argv, "\x00") != strings.Join(want, "\x00") {
		t.Fatalf("argv %q", argv)
	}
}

func TestRunFlagsBecomeTheSpec(t *testing.T) {
	h := newHarness(t)
	h.vars["FROM_HERE"] = "yes"
	got := h.run("run", "-m512m", "--cpus", "1.5", "--pids=100", "--disk", "1g", "--ttl", "5m", "--lifetime=1h", "--rm",
		"-e", "A=b=c", "-e", "FROM_HERE", "-e", "NOT_HERE", "-l", "job=17", "--workspace", "w:1", "--toolkit", "t:1", "--toolkit", "t:2",
		"-u", "nobody", "-w", "/tmp", "--name", "N", "--hostname", "box", "--network", "pypi=false", "--network", "10.0.0.0/8:443", "--network", "npm=1",
		"--inodes", "1000", "--network-bandwidth", "10m", "--network-connections", "7", "debian:12", "--timeout", "1500ms", "true")
	h.want(got, "", "", 0)
	s, l := h.f.creates[0], h.f.creates[0].Limits
	if s.Image != "debian:12" || l.MemoryBytes != 512<<20 || l.CpuCores != 1.5 || l.Pids != 100 || l.DiskBytes != 1<<30 ||
		s.IdleTimeoutSeconds != 300 || s.LifetimeSeconds != 3600 || s.Env["A"] != "b=c" || s.Env["FROM_HERE"] != "yes" || len(s.Env) != 2 ||
		s.Labels["job"] != "17" || s.Workspace != "w:1" || strings.Join(s.Toolkits, " ") != "t:1 t:2" || s.User != "nobody" || s.Workdir != "/tmp" ||
		s.Name != "N" || s.Hostname != "box" || s.NetworkRules["pypi"] || !s.NetworkRules["10.0.0.0/8:443"] || !s.NetworkRules["npm"] ||
		len(s.NetworkRules) != 3 || l.Inodes != 1000 || l.NetworkBytesPerSecond != 10<<20 || l.NetworkConnections != 7 {
		t.Fatalf("spec %v", s)
	}
	if c := h.f.execs[0]; c.TimeoutSeconds != 1.5 || len(c.Argv) != 1 || c.StdinFollows {
		t.Fatalf("command %v", c)
	}
}

func TestRunWithoutCommandPrintsID(t *testing.T) {
	h := newHarness(t)
	for _, args := range [][]string{{"run", "--keep", "debian"}, {"run", "-d", "debian"}, {"run", "-d", "debian", "hang"}} {
		got := h.run(args...)
		if id, err := sandbox.ParseID(strings.TrimSuffix(got.stdout, "\n")); err != nil || got.code != 0 || h.f.sandboxes[string(id)] == nil {
			t.Fatalf("%v: %+v, %v", args, got, err)
		}
	}
	if n := h.f.live(); n != 3 {
		t.Fatalf("%d sandboxes live, want 3", n)
	}
}

func TestRunNeedsACommand(t *testing.T) {
	h := newHarness(t)
	h.wantError(h.run("run", "debian"), exitUsage, "the command is missing", "-d")
	h.wantError(h.run("run", "--rm", "debian"), exitUsage, "the command is missing")
	h.wantError(h.run("run", "-d", "--timeout", "5s", "debian"), exitUsage, "--timeout", "--ttl")
	if n := h.f.live(); n != 0 {
		t.Fatalf("%d sandboxes were made", n)
	}
}

func TestNetworkNone(t *testing.T) {
	h := newHarness(t)
	h.want(h.run("run", "--network", "none", "debian", "true"), "", "", 0)
	if rules := h.f.creates[0].NetworkRules; len(rules) != 0 {
		t.Fatalf("%v", rules)
	}
	h.wantError(h.run("run", "--network", "none", "--network", "pypi=true", "debian", "true"), exitUsage, "contradicts")
}

func TestRunKeep(t *testing.T) {
	h := newHarness(t)
	got := h.run("run", "--keep", "debian", "true")
	if got.code != 0 || h.f.live() != 1 || !strings.Contains(got.stderr, "is kept") {
		t.Fatalf("%+v, %d live", got, h.f.live())
	}
}

func TestRunStdin(t *testing.T) {
	h := newHarness(t)
	data := make([]byte, 5*client.StdinChunk+17)
	rand.Read(data)
	h.stdin = bytes.NewReader(data)
	got := h.run("run", "-i", "debian", "cat")
	if got.code != 0 || got.stdout != string(data) || got.stderr != "" {
		t.Fatalf("exit %d, %d of %d bytes, stderr %q", got.code, len(got.stdout), len(data), got.stderr)
	}
	if h.f.called("stdin") < 6 {
		t.Fatalf("%d requests with input", h.f.called("stdin"))
	}
}

func TestRunStdinThatNobodyWants(t *testing.T) {
	h := newHarness(t)
	r, w := io.Pipe() // never ends
	defer w.Close()
	h.stdin = r
	h.want(recv(t, h.start("run", "-i", "debian", "true")), "", "", 0)
	h.stdin = io.LimitReader(neverEnding('x'), 4*client.StdinChunk)
	h.want(recv(t, h.start("run", "-i", "debian", "echo", "done")), "done\n", "", 0)
}

// Only a command that wants no more input ends the feed in silence.
func TestRefusedInputIsSaid(t *testing.T) {
	h := newHarness(t)
	for reason, silent := range map[string]bool{
		"stdin_broken": true, "stdin_closed": true, "sandbox_ended": true, "sandbox_not_found": true,
		"stdin_gap": false, "no_stdin": false, "command_not_found": false,
	} {
		err := sandbox.Errorf(sandbox.FailedPrecondition, reason, "the input is refused")
		if client.RefusesInput(err) != silent {
			t.Errorf("%s: taken as the end of the command: %v", reason, !silent)
		}
	}
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut {
			return false
		}
		byteError(w, http.StatusConflict, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_gap", "there is a gap in the input"))
		return true
	})
	h.stdin = strings.NewReader("some")
	h.wantError(recv(t, h.start("run", "-i", "debian", "cat")), 125, "a gap in the input")
}

type neverEnding byte

func (b neverEnding) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(b)
	}
	return len(p), nil
}

func TestRunExitCodes(t *testing.T) {
	h := newHarness(t)
	h.f.programs["slow"] = func(*process) int { return -124 }
	h.f.programs["greedy"] = func(*process) int { return -9 }
	h.f.programs["killed"] = func(*process) int { return 143 }
	h.wantError(h.run("run", "--timeout", "10s", "debian", "slow"), 124, "time-out of 10s")
	h.wantError(h.run("run", "debian", "greedy"), 137, "ran out of memory", "--memory")
	h.wantError(h.run("run", "debian", "killed"), 143)
	h.wantError(h.run("run", "debian", "nonesuch"), 127, "nonesuch")
	h.f.startFailure = sandbox.Errorf(sandbox.FailedPrecondition, "not_executable", "it is not executable")
	h.wantError(h.run("run", "debian", "locked"), 126, "not executable")
	h.wantError(h.run("run", "-d", "debian", "locked"), 126, "not executable")
	h.f.startFailure = nil
	h.wantError(h.run("run", "missing", "true"), 125, "missing:latest", "image ls")
	h.vars["DSEC_API_KEY"] = "wrong"
	h.wantError(h.run("run", "debian", "true"), 125, "API key")
	if n := h.f.live(); n != 0 {
		t.Fatalf("%d sandboxes are left", n)
	}
}

func TestRunUsage(t *testing.T) {
	h := newHarness(t)
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"run"}, "image is missing"},
		{[]string{"run", "--nonesuch", "debian"}, "--nonesuch"},
		{[]string{"run", "-m", "much", "debian"}, "512m"},
		{[]string{"run", "-m"}, "needs a value"},
		{[]string{"run", "--ttl", "0", "debian"}, "greater than 0"},
		{[]string{"run", "--ttl", "-5s", "debian"}, "greater than 0"},
		{[]string{"run", "-it", "debian", "true"}, "not a terminal"},
		{[]string{"run", "-t", "debian"}, "command is missing"},
		{[]string{"run", "-d", "--rm", "debian", "true"}, "--ttl"},
		{[]string{"run", "-di", "debian", "cat"}, "-i contradicts"},
		{[]string{"run", "-i", "debian"}, "needs a command"},
		{[]string{"run", "--shell", "x", "debian", "true"}, "--shell"},
		{[]string{"run", "-e", "=x", "debian", "true"}, "KEY=VALUE"},
		{[]string{"run", "--network", "pypi=perhaps", "debian", "true"}, "true or false"},
		{[]string{"run", "--network", "pypi", "--network", "pypi=false", "debian", "true"}, "twice"},
		{[]string{"run", "-l", "job", "debian", "true"}, "KEY=VALUE"},
	} {
		got := h.run(c.args...)
		h.wantError(got, exitUsage, "dsec: ", c.says, "Usage: dsec run [flags] IMAGE [COMMAND ARG...]\n")
	}
	if len(h.f.creates) != 0 {
		t.Fatalf("a wrong command line made a sandbox")
	}
}

func TestRunInterrupt(t *testing.T) {
	h := newHarness(t)
	saw := h.stdout.saw("hanging\n")
	done := h.start("run", "debian", "hang")
	recv(t, saw)
	h.interrupt()
	h.want(recv(t, done), "hanging\n", "", 130)
	if h.f.live() != 0 || h.f.called("KillCommand") == 0 {
		t.Fatalf("%d sandboxes are left, %d kills", h.f.live(), h.f.called("KillCommand"))
	}
}

func TestRunInterruptWhileCreating(t *testing.T) {
	h := newHarness(t)
	arrived := make(chan struct{}, 1)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/CreateSandbox") {
			return false
		}
		// The create goes through, its answer does not.
		rec := &discardResponse{header: make(http.Header)}
		body, _ := io.ReadAll(r.Body)
		f := h.f
		f.setIntercept(nil)
		again := r.Clone(r.Context())
		again.Body = io.NopCloser(bytes.NewReader(body))
		f.server.Config.Handler.ServeHTTP(rec, again)
		arrived <- struct{}{}
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	})
	done := h.start("run", "debian", "hang")
	recv(t, arrived)
	if h.f.live() != 1 {
		t.Fatal("the fake made no sandbox")
	}
	h.interrupt()
	h.want(recv(t, done), "", "", 130)
	if h.f.live() != 0 {
		t.Fatal("the sandbox of an interrupted create is left")
	}
}

type discardResponse struct{ header http.Header }

func (d *discardResponse) Header() http.Header         { return d.header }
func (d *discardResponse) Write(p []byte) (int, error) { return len(p), nil }
func (d *discardResponse) WriteHeader(int)             {}

func TestRunSecondInterruptDoesNotWait(t *testing.T) {
	h := newHarness(t)
	stuck := make(chan struct{}, 8)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, "/DeleteSandbox") || strings.HasSuffix(r.URL.Path, "/KillCommand") {
			io.Copy(io.Discard, r.Body) // else the server does not see the client go
			stuck <- struct{}{}
			<-r.Context().Done()
			panic(http.ErrAbortHandler)
		}
		return false
	})
	saw := h.stdout.saw("hanging\n")
	done := h.start("run", "debian", "hang")
	recv(t, saw)
	h.interrupt()
	recv(t, stuck)
	h.force()
	got := recv(t, done)
	if got.code != 130 || !strings.Contains(got.stderr, "may still be there") || !strings.Contains(got.stderr, "dsec rm s") {
		t.Fatalf("%+v", got)
	}
}

// failingWriter is a reader of ours that has gone.
type failingWriter struct{ after int }

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.after -= len(p); w.after < 0 {
		return 0, syscall.EPIPE
	}
	return len(p), nil
}

func TestRunWhenOurReaderGoes(t *testing.T) {
	h := newHarness(t)
	h.c.stdout = &failingWriter{}
	got := recv(t, h.start("run", "debian", "hang"))
	if got.code != 141 || got.stderr != "" || h.f.live() != 0 {
		t.Fatalf("%+v, %d sandboxes left", got, h.f.live())
	}
}

func TestRunSurvivesCutConnections(t *testing.T) {
	h := newHarness(t)
	data := make([]byte, 3000)
	rand.Read(data)
	h.f.programs["talk"] = func(p *process) int {
		for i := 0; i < len(data); i += 100 {
			p.stdout.Write(data[i : i+100])
			p.stderr.Write(data[i : i+50])
		}
		return 7
	}
	h.f.cutOutput = 77
	got := h.run("run", "debian", "talk")
	var stderr []byte
	for i := 0; i < len(data); i += 100 {
		stderr = append(stderr, data[i:i+50]...)
	}
	h.want(got, string(data), string(stderr), 7)
	if n := h.f.called("stdout"); n < 3000/77 {
		t.Fatalf("only %d requests: nothing was cut", n)
	}
}

func TestRunNoticesShortOutput(t *testing.T) {
	h := newHarness(t)
	h.f.programs["long"] = func(p *process) int {
		p.stdout.Write([]byte("one "))
		p.stdout.Write([]byte("two"))
		return 0
	}
	h.f.shortOutput = 2 // something between ends the answers early but properly
	h.want(h.run("run", "debian", "long"), "one two", "", 0)
}

func TestRunRetriesLostAnswers(t *testing.T) {
	h := newHarness(t)
	var lost atomic.Int32
	seen := make(map[string]bool)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		h.f.mu.Lock()
		first := !seen[r.URL.Path]
		seen[r.URL.Path] = true
		h.f.mu.Unlock()
		if !first || strings.HasSuffix(r.URL.Path, "/CreateSandbox") {
			return false
		}
		lost.Add(1)
		panic(http.ErrAbortHandler)
	})
	h.want(h.run("run", "debian", "echo", "once"), "once\n", "", 0)
	if len(h.f.creates) != 1 || len(h.f.execs) != 1 || lost.Load() < 4 || h.f.live() != 0 {
		t.Fatalf("%d creates, %d commands, %d lost answers, %d left", len(h.f.creates), len(h.f.execs), lost.Load(), h.f.live())
	}
}

func TestRunGivesUpAndSaysSo(t *testing.T) {
	h := newHarness(t)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, "/CreateSandbox") {
			return false
		}
		panic(http.ErrAbortHandler)
	})
	got := h.run("run", "debian", "true")
	h.wantError(got, 125, "trying again for 30s", "does not answer", "may still be there")
	const patience = 30 * time.Second // of the client
	if h.slept < patience || h.slept > 10*patience {
		t.Fatalf("it waited %v", h.slept)
	}
}

func TestNothingListens(t *testing.T) {
	h := newHarness(t)
	h.f.server.Close()
	got := h.run("run", "debian", "true")
	h.wantError(got, 125, h.f.server.URL, "nothing listens", "dsec up")
	if h.slept != 0 {
		t.Fatalf("it waited %v for a platform that never answered", h.slept)
	}
	h.vars["DSEC_URL"] = "unix://" + t.TempDir() + "/none.sock"
	h.wantError(h.run("ps"), 1, "nothing listens")
}

func TestNotAPlatform(t *testing.T) {
	h := newHarness(t)
	h.f.setIntercept(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, "<h1>\x1b[31mno</h1>")
		return true
	})
	got := h.run("ps")
	h.wantError(got, 1, "does not speak dsec's API", "environment")
	got = h.run("cp", string(sandbox.NewID("abcde"))+":/x", "-")
	h.wantError(got, 1, "does not speak dsec's API")
}

func TestRunDroppedMiddle(t *testing.T) {
	h := newHarness(t)
	h.f.programs["flood"] = func(p *process) int {
		c := p.stdout.(fakeWriter).c
		c.mu.Lock()
		c.dropped[0] = [2]int64{3, 8}
		c.mu.Unlock()
		io.WriteString(p.stdout, "0123456789")
		return 0
	}
	got := h.run("run", "debian", "flood")
	if got.code != 0 || got.stdout != "01289" || !strings.Contains(got.stderr, "5 bytes of stdout are missing") {
		t.Fatalf("%+v", got)
	}
}

func TestRunJSON(t *testing.T) {
	h := newHarness(t)
	got := h.run("run", "--json", "debian", "both")
	var v struct {
		Sandbox struct{ ID, State string }
		Result  struct {
			ExitCode       *int
			Stdout, Stderr struct{ Data []byte }
		}
	}
	if err := json.Unmarshal([]byte(got.stdout), &v); err != nil || strings.Count(got.stdout, "\n") != 1 {
		t.Fatalf("%q: %v", got.stdout, err)
	}
	if got.code != 3 || *v.Result.ExitCode != 3 || string(v.Result.Stdout.Data) != "out\x00\xff" || v.Sandbox.ID == "" || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	got = h.run("run", "--json", "missing", "true")
	if want := `{"error":{"code":"not_found","reason":"environment_not_found","message":"there is no image missing:latest; ` + "`dsec image ls`" + ` lists what there is"}}` + "\n"; got.stderr != want || got.code != 125 {
		t.Fatalf("%+v", got)
	}
}

func TestExec(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(func(s *dsecv1.Sandbox) { s.Spec.Name = "bench" })
	for _, ref := range []string{s.Id, s.Id[:10], "bench"} {
		h.want(h.run("exec", ref, "echo", "hi"), "hi\n", "", 0)
	}
	h.want(h.run("exec", "-u", "nobody", "-w", "/tmp", "-e", "A=b", "bench", "--shell", "echo 1; exit"), "script: echo 1; exit\n", "", 0)
	if c := h.f.execs[3]; c.User != "nobody" || c.Cwd != "/tmp" || c.Env["A"] != "b" || c.Shell != "echo 1; exit" {
		t.Fatalf("command %v", c)
	}
	h.wantError(h.run("exec", "bench"), exitUsage, "command is missing")
	h.wantError(h.run("exec", "nonesuch", "true"), 125, "no sandbox", "dsec ps")
	h.wantError(h.run("exec", string(sandbox.NewID("abcde")), "true"), 125, "no such sandbox")
	if h.f.live() != 1 {
		t.Fatal("exec removed the sandbox")
	}
}

func TestExecInterruptKillsTheCommandOnly(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	saw := h.stdout.saw("hanging\n")
	done := h.start("exec", s.Id, "hang")
	recv(t, saw)
	h.interrupt()
	h.want(recv(t, done), "hanging\n", "", 130)
	if h.f.live() != 1 || h.f.called("KillCommand") != 1 {
		t.Fatalf("%d live, %d kills", h.f.live(), h.f.called("KillCommand"))
	}
}

func TestExecSaysWhenTheSandboxEnded(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	saw := h.stdout.saw("hanging\n")
	done := h.start("exec", s.Id, "hang")
	recv(t, saw)
	other := bareHarness(t)
	other.vars = h.vars
	if got := other.run("rm", s.Id); got.code != 0 {
		t.Fatalf("%+v", got)
	}
	got := recv(t, done)
	if got.code != 137 || !strings.Contains(got.stderr, "the sandbox is stopped (deleted)") {
		t.Fatalf("%+v", got)
	}
}

func TestStdinThatFails(t *testing.T) {
	h := newHarness(t)
	h.stdin = io.MultiReader(strings.NewReader("some"), &brokenReader{})
	got := h.run("run", "-i", "debian", "cat")
	if got.code != 0 || got.stdout != "some" || !strings.Contains(got.stderr, "broken disk") {
		t.Fatalf("%+v", got)
	}
}

type brokenReader struct{}

func (*brokenReader) Read([]byte) (int, error) { return 0, errors.New("broken disk") }
