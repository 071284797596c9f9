package edge

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func starting(start string, probe *dsecv1.Probe) func(*edgev1.CreateSandbox) {
	return func(c *edgev1.CreateSandbox) {
		if start != "" {
			c.Spec.Start = &dsecv1.Command{Shell: start}
		}
		if probe != nil {
			probe.IntervalSeconds = 0.05
		}
		c.Spec.ReadyWhen = probe
	}
}

func portOf(t *testing.T, l net.Addr) int32 {
	t.Helper()
	return int32(l.(*net.TCPAddr).Port)
}

func TestReadyWhen(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	var asked atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.RequestURI() != "/health?x=%2F" {
			t.Errorf("%s", r.URL.RequestURI())
		}
		if asked.Add(1) < 3 {
			rw.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	port := portOf(t, srv.Listener.Addr())
	id := w.create(starting("wait", &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: port, Path: "/health?x=%2F"}}))
	if n := asked.Load(); n != 3 {
		t.Errorf("asked %d times", n)
	}
	if c, ok := w.guest(id).Command(sandbox.StartCommand); !ok || !c.Result().Running {
		t.Error("the start command does not run")
	}
	v := w.get(id)
	if _, ok := v.StepSeconds["probe"]; !ok || v.Spec.GetReadyWhen().GetHttp().GetPort() != port || v.Spec.GetStart().GetShell() != "wait" {
		t.Errorf("%v", v)
	}
	w.create(starting("", &dsecv1.Probe{TcpPort: port}))
	id = w.create(starting("", &dsecv1.Probe{Exec: &dsecv1.Command{Shell: "exit 0"}}))
	if left := w.guest(id).Commands(); len(left) != 0 {
		t.Errorf("tries are left: %v", left)
	}
	id = w.create(starting("echo hello", nil))
	if c, ok := w.guest(id).Command(sandbox.StartCommand); !ok || w.guest(id).last.User != "agent" || c == nil {
		t.Error("no start command, or without the sandbox's defaults")
	}
}

func TestProbeThatFails(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := portOf(t, l.Addr())
	l.Close()
	busy := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusTeapot) }))
	defer busy.Close()
	garbage, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer garbage.Close()
	go func() {
		for {
			c, err := garbage.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("\x00garbage\r\n\r\n"))
			c.Close()
		}
	}()
	for name, c := range map[string]struct {
		start string
		probe *dsecv1.Probe
		want  string
		fact  string
	}{
		"refused":     {"wait", &dsecv1.Probe{TcpPort: port}, "nothing listens on port", ""},
		"status":      {"", &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: portOf(t, busy.Listener.Addr())}}, "HTTP status 418", ""},
		"garbage":     {"", &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: portOf(t, garbage.Addr())}}, "no valid HTTP answer", ""},
		"exit code":   {"", &dsecv1.Probe{Exec: &dsecv1.Command{Shell: "exit 3"}}, "exit code 3", ""},
		"output":      {"echo some words", &dsecv1.Probe{TcpPort: port}, `exit code 0, stdout: "some words"`, "0"},
		"start ended": {"exit 7", &dsecv1.Probe{TcpPort: port}, "exit code 7", "7"},
	} {
		_, err := w.tryCreate(starting(c.start, c.probe), deadline(time.Second))
		e := sandbox.AsError(err)
		if err == nil || e.Reason != sandbox.ReasonProbeFailed || !strings.Contains(e.Message, c.want) || (c.fact != "" && e.Facts["exit_code"] != c.fact) {
			t.Errorf("%s: %v %v", name, err, e)
		}
		if err != nil {
			w.expect(sandbox.ID(e.Facts[grpcerr.FactSandboxID]), dsecv1.State_STATE_FAILED, sandbox.ReasonProbeFailed)
		}
	}
	w.nothingLeft("after probes that failed")
}

// Creates that wait for their probe hold nobody up, and can be deleted.
func TestProbesTakeNoPlace(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Parallel = 1 })
	defer w.close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := portOf(t, l.Addr())
	l.Close()
	c := w.spec(starting("wait", &dsecv1.Probe{TcpPort: port}))
	done := make(chan *edgev1.CreateResult, 1)
	go func() {
		all, _ := w.createAll(w.user(), c)
		done <- all[c.Id]
	}()
	for { // it is at its probe
		if in, err := w.e.index.lookup(sandbox.ID(c.Id), "default"); err == nil && in.probing.late() != nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if v := w.get(sandbox.ID(c.Id)); v.State != dsecv1.State_STATE_CREATING {
		t.Errorf("%v", v.State)
	}
	w.create()
	w.delete(sandbox.ID(c.Id), true)
	if r := <-done; r.GetFailure().GetInfo().GetReason() != sandbox.ReasonDeleted {
		t.Errorf("%v", r)
	}
}

func TestProbesAreChecked(t *testing.T) {
	w := newWorld(t)
	defer w.close()
	for name, change := range map[string]func(*dsecv1.SandboxSpec){
		"nothing":  func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{} },
		"two":      func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{TcpPort: 1, Http: &dsecv1.HttpProbe{Port: 1}} },
		"port":     func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{TcpPort: 65536} },
		"negative": func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{TcpPort: -1} },
		"path":     func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: 1, Path: "x"}} },
		"split": func(s *dsecv1.SandboxSpec) {
			s.ReadyWhen = &dsecv1.Probe{Http: &dsecv1.HttpProbe{Port: 1, Path: "/\r\nA: b"}}
		},
		"interval":    func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{TcpPort: 1, IntervalSeconds: 0.001} },
		"try":         func(s *dsecv1.SandboxSpec) { s.ReadyWhen = &dsecv1.Probe{TcpPort: 1, TryTimeoutSeconds: 1e9} },
		"empty start": func(s *dsecv1.SandboxSpec) { s.Start = &dsecv1.Command{} },
		"follows":     func(s *dsecv1.SandboxSpec) { s.Start = &dsecv1.Command{Shell: "x", StdinFollows: true} },
		"session":     func(s *dsecv1.SandboxSpec) { s.Start = &dsecv1.Command{Shell: "x", Session: "s"} },
		"terminal":    func(s *dsecv1.SandboxSpec) { s.Start = &dsecv1.Command{Shell: "x", Terminal: &dsecv1.Terminal{}} },
	} {
		_, err := w.tryCreate(func(c *edgev1.CreateSandbox) { change(c.Spec) })
		if sandbox.ClassOf(err) != sandbox.InvalidArgument || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
