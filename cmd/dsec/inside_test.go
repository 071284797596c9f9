package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
)

func named(h *harness) {
	h.f.add(func(s *dsecv1.Sandbox) { s.Id, s.Spec.Name = fixedID("one"), "box" })
}

func TestInsideUsage(t *testing.T) {
	h := newHarness(t)
	named(h)
	for _, c := range []struct {
		args string
		says string
	}{
		{"port-forward box", "sandbox or port is missing"},
		{"port-forward box 0", "no port"},
		{"port-forward box x:80", "not [[ADDRESS:]LOCAL:]REMOTE"},
		{"port-forward box 70000", "no port"},
		{"url box", "missing"},
		{"url box http", "no port"},
		{"url --expires 0 box 80", "greater than 0"},
		{"http box", "missing"},
		{"http box ftp://localhost/", "no URL"},
		{"http box GET localhost:8000 -H x", "NAME: VALUE"},
		{"http box B\x01D localhost:8000", "method"},
		{"stats --interval 1ms", "at least 100ms"},
		{"top", "the sandbox is missing"},
		{"top box x", "one argument too many"},
		{"signal box", "missing"},
		{"signal box 0", "no process id"},
		{"signal -s NO box 1", "not a signal"},
		{"files", "Usage: dsec files COMMAND"},
		{"files ls", "the sandbox is missing"},
		{"files stat box", "missing"},
		{"files mkdir -m 9 box /x", "no octal mode"},
		{"files chmod box rw /x", "no octal mode"},
		{"files chmod box 644", "missing"},
		{"files mv box /a", "missing"},
		{"files mv box /a /b /c", "one argument too many"},
		{"files watch box", "missing"},
		{"session create", "the sandbox is missing"},
		{"session rm box", "missing"},
		{"watch -l x", "KEY=VALUE"},
		{"run -d --start= debian", "--start is empty"},
		{"logs --list box 5f", "--list is of all"},
		{"logs --tail x box", "neither a number"},
		{"logs --since x box", "neither a duration"},
		{"logs --since 10m --tail 3 box", "not both"},
		{"logs --stdout --stream stderr box", "contradicts"},
		{"kill --tag x box y", "not both"},
		{"exec --session s -i box cat", "--session contradicts"},
		{"exec --session s -w /x box pwd", "--session contradicts"},
		{"exec --no-output-timeout x box true", "does not fit"},
		{"run --ready-http x debian true", "--ready-http"},
		{"run --ready-tcp 80 --ready-exec true debian true", "one of"},
	} {
		got := h.run(strings.Split(c.args, " ")...)
		h.wantError(got, exitUsage, c.says)
		if line, _, _ := strings.Cut(got.stderr, "\n"); !strings.HasPrefix(got.stderr, "Usage: ") && !strings.HasPrefix(line, "dsec: ") {
			t.Errorf("%s: %q", c.args, got.stderr)
		}
	}
	if len(h.f.inside.changes) != 0 || len(h.f.execs) != 0 {
		t.Fatal("a wrong command line did something")
	}
}

func TestCommandFlags(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.want(h.run("exec", "--tag", "t1", "--trusted", "--no-output-timeout", "90s", "box", "true"), "", "", 0)
	h.want(h.run("exec", "--session", "build", "box", "echo", "a b", "it's", "$HOME"), "script: echo 'a b' 'it'\\''s' '$HOME'\n", "", 0)
	if c := h.f.execs[0]; c.Tag != "t1" || !c.Trusted || c.NoOutputTimeoutSeconds != 90 {
		t.Fatalf("%v", c)
	}
	if c := h.f.execs[1]; c.Session != "build" || c.Argv != nil || c.User != "" {
		t.Fatalf("%v", c)
	}
	h.want(h.run("run", "--start", "serve &", "--ready-http", "8000/health", "debian", "true"), "", "", 0)
	h.want(h.run("run", "--ready-tcp", "5432", "debian", "true"), "", "", 0)
	h.want(h.run("run", "--ready-exec", "test -e /ok", "debian", "true"), "", "", 0)
	first, second, third := h.f.creates[0], h.f.creates[1].ReadyWhen, h.f.creates[2].ReadyWhen
	if first.Start.GetShell() != "serve &" || first.ReadyWhen.GetHttp().GetPort() != 8000 || first.ReadyWhen.GetHttp().GetPath() != "/health" ||
		second.GetTcpPort() != 5432 || third.GetExec().GetShell() != "test -e /ok" {
		t.Fatalf("%v", h.f.creates)
	}
}

func TestLogsTailAndSince(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.programs["lines"] = func(p *process) int {
		io.WriteString(p.stdout, "one\ntwo\nthree\n")
		io.WriteString(p.stderr, "uno\ndue\n")
		return 0
	}
	h.run("exec", "--tag", "L", "box", "lines")
	h.run("exec", "box", "echo", "other")
	h.want(h.run("logs", "--tag", "L", "-n2", "box"), "two\nthree\n", "uno\ndue\n", 0)
	h.want(h.run("logs", "--tag", "L", "--tail", "1", "--stdout", "box"), "three\n", "", 0)
	h.want(h.run("logs", "--tag", "L", "--tail", "all", "--stderr", "box"), "", "uno\ndue\n", 0)
	h.want(h.run("logs", "--tag", "L", "--tail", "0", "-f", "box"), "", "", 0)
	h.want(h.run("logs", "--tag", "L", "--since", "10m", "box"), "", "", 0)
	h.want(h.run("logs", "--stdout", "--stderr", "--tag", "L", "box"), "one\ntwo\nthree\n", "uno\ndue\n", 0)
	var seen bool
	for _, q := range h.f.queries {
		seen = seen || strings.Contains(q, "since=1772366400000") || strings.Contains(q, "since=1772365800000")
	}
	if !seen {
		t.Fatalf("%q", h.f.queries)
	}
}

func TestSessions(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.want(h.run("session", "create", "box", "build", "-w", "/src"), "build\n", "", 0)
	if got := h.run("session", "create", "--json", "box"); !strings.HasPrefix(got.stdout, `{"name":"s-`) {
		t.Fatalf("%+v", got)
	}
	h.f.inside.sessions[1] = &dsecv1.Session{Name: "old", Ended: true, Reason: "exited", ExitCode: 3, Shell: "sh"}
	h.want(h.run("session", "ls", "box"), `NAME    STATUS       CREATED   RUNNING   WAITING   SHELL
build   ready        now                 0         bash
old     exited (3)                       0         sh
`, "", 0)
	h.want(h.run("session", "rm", "box", "build", "old"), "build\nold\n", "", 0)
	h.wantError(h.run("sessions"), exitUsage, "dsec session ls")
}

func TestStats(t *testing.T) {
	h := newHarness(t)
	named(h)
	want := "ID             CPU   MEMORY   LIMIT   DISK   PIDS   NET RX   NET TX   OOM KILLS\n" +
		"sabcdeoneaaa   50%   3 MiB    1 GiB   0 B    7      -        0 B      0\n"
	h.want(h.run("stats", "--no-stream"), want, "", 0)
	h.want(h.run("stats", "--no-stream", "box"), want, "", 0)
	if got := h.run("stats", "box"); got.code != 0 || !strings.HasPrefix(got.stdout, "ID  ") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("stats", "--json", "box"); got.code != 0 || strings.Count(got.stdout, `"memoryBytes":"3145728"`) != 3 {
		t.Fatalf("%+v", got)
	}
	h.wantError(h.run("stats", "none"), 1, "no sandbox")
}

func TestTopAndSignal(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.processes = []*dsecv1.Process{
		{Pid: 1, Name: "aether", State: "S", MemoryBytes: 1 << 20, Threads: 4},
		{Pid: 17, Parent: 1, Uid: 1000, Name: "python3", Argv: []string{"python3", "-c", "evil\x1b[2J"}, State: "R", CpuSeconds: 1.5, MemoryBytes: 9 << 20, Threads: 1, CommandId: "0123456789abcdef"},
	}
	h.want(h.run("top", "box"), `PID   PPID   UID    STATE   CPU    MEMORY   THREADS   COMMAND ID     COMMAND
1     0      0      S       0s     1 MiB    4                        [aether]
17    1      1000   R       1.5s   9 MiB    1         0123456789ab   python3 -c evil [2J
`, "", 0)
	if got := h.run("top", "--json", "box"); strings.Count(got.stdout, "\n") != 2 {
		t.Fatalf("%+v", got)
	}
	got := h.run("signal", "-s", "KILL", "box", "17", "404", "18")
	if got.code != 1 || got.stdout != "17\n18\n" || !strings.Contains(got.stderr, "no process 404") {
		t.Fatalf("%+v", got)
	}
	if s := h.f.inside.signals; len(s) != 2 || s[0].Signal != 9 || s[1].Pid != 18 {
		t.Fatalf("%v", s)
	}
}

// Names are other people's: a newline or an escape in one does not reach the terminal, and JSON has it whole (C7).
func TestFilesLs(t *testing.T) {
	h := newHarness(t)
	named(h)
	at := timestamppb.New(testTime)
	h.f.inside.listing = []*dsecv1.FileInfo{
		{Path: "ü n.txt", Type: dsecv1.FileType_FILE_TYPE_REGULAR, Mode: 0o4755, Size: 12, ModifiedAt: at},
		{Path: "a\nb\x1b[2J", Type: dsecv1.FileType_FILE_TYPE_DIRECTORY, Mode: 0o1777, Uid: 7, Gid: 8, ModifiedAt: at},
		{RawPath: []byte("raw\xff"), Type: dsecv1.FileType_FILE_TYPE_SYMLINK, Mode: 0o777, LinkTarget: "to", ModifiedAt: at},
	}
	h.want(h.run("files", "ls", "box", "/x"), "a\\nb\\x1b[2J\nraw\\xff\nü n.txt\n", "", 0)
	h.want(h.run("files", "ls", "-l", "box"), `drwxrwxrwt   7:8   0    2026-03-01 12:00:00   a\nb\x1b[2J
lrwxrwxrwx   0:0   0    2026-03-01 12:00:00   raw\xff -> to
-rwsr-xr-x   0:0   12   2026-03-01 12:00:00   ü n.txt
`, "", 0)
	h.want(h.run("files", "ls", "-U", "box", "/x"), "ü n.txt\na\\nb\\x1b[2J\nraw\\xff\n", "", 0)
	got := h.run("files", "ls", "--json", "box")
	var e struct{ Path string }
	lines := strings.Split(got.stdout, "\n")
	if err := json.Unmarshal([]byte(lines[1]), &e); err != nil || e.Path != "a\nb\x1b[2J" || len(lines) != 4 {
		t.Fatalf("%q: %v", lines, err)
	}
	h.wantError(h.run("files", "ls", "box", "/missing"), 1, "no directory /missing")
}

func TestFilesStat(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.stats = map[string]*dsecv1.FileInfo{"/a": {Path: "/a", Type: dsecv1.FileType_FILE_TYPE_FIFO, Mode: 0o600}}
	got := h.run("files", "stat", "box", "/a", "/b")
	if got.code != 1 || !strings.HasPrefix(got.stdout, "prw-------") || !strings.Contains(got.stderr, "there is no /b") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("files", "stat", "--json", "box", "/a"); got.code != 0 || !strings.Contains(got.stdout, `"mode":384`) {
		t.Fatalf("%+v", got)
	}
}

func TestNamesThatAreNotText(t *testing.T) {
	h := newHarness(t)
	named(h)
	bad := "/b\xff"
	for _, args := range [][]string{
		{"mkdir", "box", "/text", bad}, {"mv", "box", bad, "/d/"}, {"cp", "box", "/a", bad}, {"rm", "box", bad}, {"chmod", "box", "644", bad},
		{"chown", "box", "0", bad}, {"ln", "-s", "box", bad, bad},
	} {
		h.want(h.run(append([]string{"files"}, args...)...), "", "", 0)
	}
	raw := []byte(bad)
	for i, want := range []*dsecv1.FileChange{
		{Change: &dsecv1.FileChange_MakeDirectory{MakeDirectory: &dsecv1.MakeDirectory{Path: "/text", Mode: 0o755}}},
		{Change: &dsecv1.FileChange_MakeDirectory{MakeDirectory: &dsecv1.MakeDirectory{RawPath: raw, Mode: 0o755}}},
		{Change: &dsecv1.FileChange_Move{Move: &dsecv1.MoveFile{RawFrom: raw, RawTo: []byte("/d" + bad)}}},
		{Change: &dsecv1.FileChange_Copy{Copy: &dsecv1.CopyFile{From: "/a", RawTo: raw}}},
		{Change: &dsecv1.FileChange_Remove{Remove: &dsecv1.RemoveFile{RawPath: raw}}},
		{Change: &dsecv1.FileChange_SetMode{SetMode: &dsecv1.SetMode{RawPath: raw, Mode: 0o644}}},
		{Change: &dsecv1.FileChange_SetOwner{SetOwner: &dsecv1.SetOwner{RawPath: raw, Owner: "0"}}},
		{Change: &dsecv1.FileChange_MakeLink{MakeLink: &dsecv1.MakeLink{RawTarget: raw, RawPath: raw}}},
	} {
		if got := h.f.inside.changes[i]; !proto.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	h.f.inside.stats = map[string]*dsecv1.FileInfo{bad: {RawPath: raw, Type: dsecv1.FileType_FILE_TYPE_REGULAR}, "/a": {Path: "/a", Type: dsecv1.FileType_FILE_TYPE_FIFO}}
	if got := h.run("files", "stat", "box", bad, "/a"); got.code != 0 || !strings.Contains(got.stdout, `/b\xff`) || !strings.Contains(got.stdout, "/a") {
		t.Errorf("%+v", got)
	}
	h.f.inside.events = []*dsecv1.WatchFilesResponse{{Ready: true}, {Events: []*dsecv1.FileEvent{{RawPath: []byte("x\xff\n"), Kind: dsecv1.FileEventKind_FILE_EVENT_KIND_CREATED}}}}
	if got := h.run("files", "watch", "box", bad); !strings.Contains(got.stdout, `created     x\xff\n`) {
		t.Errorf("%+v", got)
	}
}

func TestFilesChange(t *testing.T) {
	h := newHarness(t)
	named(h)
	for _, args := range []string{
		"mkdir -p -m 700 box /a /b", "mv box /x/y /d/", "mv -n box /x /z", "cp -r box /x/ /d/", "rm -rf box /r", "chmod -R box 0644 /m", "chown box 1:2 /o", "ln -s box /t /l", "ln box /t /h",
	} {
		h.want(h.run(append([]string{"files"}, strings.Fields(args)...)...), "", "", 0)
	}
	c := h.f.inside.changes
	if len(c) != 10 {
		t.Fatalf("%v", c)
	}
	if m := c[0].GetMakeDirectory(); m.GetPath() != "/a" || m.GetMode() != 0o700 || !m.GetParents() || c[1].GetMakeDirectory().GetPath() != "/b" {
		t.Errorf("%v", c[:2])
	}
	if m := c[2].GetMove(); m.GetTo() != "/d/y" || m.GetExclusive() || c[3].GetMove().GetTo() != "/z" || !c[3].GetMove().GetExclusive() {
		t.Errorf("%v", c[2:4])
	}
	if m := c[4].GetCopy(); m.GetTo() != "/d/x" || !m.GetRecursive() {
		t.Errorf("%v", m)
	}
	if m := c[5].GetRemove(); !m.GetRecursive() || !m.GetMissingOk() {
		t.Errorf("%v", m)
	}
	if c[6].GetSetMode().GetMode() != 0o644 || !c[6].GetSetMode().GetRecursive() || c[7].GetSetOwner().GetOwner() != "1:2" ||
		c[8].GetMakeLink().GetHard() || !c[9].GetMakeLink().GetHard() {
		t.Errorf("%v", c[6:])
	}
}

func TestFilesWatch(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.events = []*dsecv1.WatchFilesResponse{
		{Ready: true},
		{Events: []*dsecv1.FileEvent{{Path: "a\nb", Kind: dsecv1.FileEventKind_FILE_EVENT_KIND_CREATED}, {Path: "d", Directory: true, Kind: dsecv1.FileEventKind_FILE_EVENT_KIND_MOVED_TO}}},
		{Overflow: true},
	}
	got := h.run("files", "watch", "box", "/x")
	if got.code != 0 || got.stdout != "created     a\\nb\nmoved to    d/\n" || !strings.Contains(got.stderr, "events were lost") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("files", "watch", "--json", "box", "/x"); !strings.HasPrefix(got.stdout, "{\"ready\":true}\n{\"path\":\"a\\nb\"") {
		t.Fatalf("%+v", got)
	}
}

func TestWatch(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.watched = []*dsecv1.WatchSandboxesResponse{
		{Event: &dsecv1.WatchSandboxesResponse_Sandbox{Sandbox: h.f.sandboxes[fixedID("one")]}},
		{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}},
		{Event: &dsecv1.WatchSandboxesResponse_Command{Command: &dsecv1.CommandEvent{SandboxId: fixedID("one"), Result: &dsecv1.CommandResult{CommandId: "c1", ExitCode: 3, Description: "make test"}}}},
		{Event: &dsecv1.WatchSandboxesResponse_EdgeLost{EdgeLost: &dsecv1.EdgeLost{Node: "abcde"}}},
	}
	saw := h.stdout.saw("is away")
	done := h.start("watch", "--commands", "box")
	recv(t, saw)
	h.interrupt()
	h.want(recv(t, done), `12:00:00  sabcdeoneaaa  ready  box
12:00:00  sabcdeoneaaa  command c1  exit 3  make test
12:00:00  node abcde is away; its sandboxes are told anew when it is back
`, "", 130)
}

// What had ended before is not shown at the beginning, unless it is asked for; what ends later is.
func TestWatchBeginsWithWhatLives(t *testing.T) {
	const first, rest = "12:00:00  sabcdeoldaaa  failed  \n", "12:00:00  sabcdeoneaaa  ready  box\n12:00:00  sabcdeoneaaa  stopped  \n"
	for line, want := range map[string]string{"watch": rest, "watch -a": first + rest} {
		h := newHarness(t)
		named(h)
		live := h.f.sandboxes[fixedID("one")]
		for _, s := range []*dsecv1.Sandbox{{Id: fixedID("old"), State: dsecv1.State_STATE_FAILED}, live, nil, {Id: live.Id, State: dsecv1.State_STATE_STOPPED}} {
			m := &dsecv1.WatchSandboxesResponse{Event: &dsecv1.WatchSandboxesResponse_Sandbox{Sandbox: s}}
			if s == nil {
				m.Event = &dsecv1.WatchSandboxesResponse_Synced{Synced: true}
			}
			h.f.inside.watched = append(h.f.inside.watched, m)
		}
		saw := h.stdout.saw("stopped")
		done := h.start(strings.Fields(line)...)
		recv(t, saw)
		h.interrupt()
		h.want(recv(t, done), want, "", 130)
	}
}

func TestWatchOfASandboxThatIsForgotten(t *testing.T) {
	h := newHarness(t)
	gone := "svujsr3itvie3g2ulpjepyty" // a whole id, which is taken as it is
	h.f.inside.watched = []*dsecv1.WatchSandboxesResponse{{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}}}
	h.wantError(h.run("watch", gone), 1, "there is no sandbox "+gone)
	// It may be on a node that does not answer.
	h.f.inside.watched = []*dsecv1.WatchSandboxesResponse{
		{Event: &dsecv1.WatchSandboxesResponse_EdgeLost{EdgeLost: &dsecv1.EdgeLost{Node: "n"}}},
		{Event: &dsecv1.WatchSandboxesResponse_Synced{Synced: true}},
	}
	seen := h.stdout.saw("node n is away")
	done := h.start("watch", gone)
	recv(t, seen)
	h.interrupt()
	if got := recv(t, done); got.code != 130 {
		t.Fatalf("%+v", got)
	}
}

func TestURL(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.want(h.run("url", "--expires", "2d", "box", "8000"), "http://p8000.example/?t=172800\n", "", 0)
	if got := h.run("url", "--json", "box", "80"); !strings.Contains(got.stdout, `"url":"http://p80.example/?t=0"`) {
		t.Fatalf("%+v", got)
	}
}

func TestParseForward(t *testing.T) {
	for text, want := range map[string]forward{
		"80": {"127.0.0.1:80", 80}, "8080:80": {"127.0.0.1:8080", 80}, ":80": {"127.0.0.1:0", 80}, "0:80": {"127.0.0.1:0", 80},
		"0.0.0.0:8080:80": {"0.0.0.0:8080", 80}, "[::1]:8080:80": {"[::1]:8080", 80}, "::1:8080:80": {"[::1]:8080", 80}, "localhost::80": {"localhost:0", 80},
	} {
		if got, err := parseForward(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", ":", "80:", "x", "80:x", "65536", "-1", ":8080:80", "1.2.3.4:x:80"} {
		if got, err := parseForward(text); err == nil {
			t.Errorf("%q: %v, want an error", text, got)
		}
	}
}

// shouting answers lines in capitals, and says bye at the end of its input.
func shouting(c io.ReadWriter) {
	for in := bufio.NewScanner(c); in.Scan(); {
		io.WriteString(c, strings.ToUpper(in.Text())+"\n")
	}
	io.WriteString(c, "bye\n")
}

func TestPortForward(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.ports = map[string]func(io.ReadWriter){"80": shouting}
	saw := h.stdout.saw("-> 81")
	done := h.start("port-forward", "box", ":80", ":81")
	recv(t, saw)
	var local [2]string
	for i, line := range strings.Split(strings.TrimSpace(h.stdout.String()), "\n") {
		local[i] = strings.Fields(line)[2]
	}
	conn, err := net.Dial("tcp", local[0])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "some\ntext\n")
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || string(got) != "SOME\nTEXT\nbye\n" {
		t.Fatalf("%q, %v", got, err)
	}
	said := h.stderr.saw("nothing listens on port 81")
	refused, err := net.Dial("tcp", local[1])
	if err == nil {
		defer refused.Close()
		if _, err = io.ReadAll(refused); err == nil {
			t.Fatal("a port that nobody listens on ended in order")
		}
	}
	recv(t, said)
	h.interrupt()
	if got := recv(t, done); got.code != 130 || strings.Count(got.stderr, "\n") != 1 {
		t.Fatalf("%+v", got)
	}
	if _, err := net.Dial("tcp", local[0]); err == nil {
		t.Fatal("it still listens")
	}
}

func TestPortForwardToNobody(t *testing.T) {
	h := newHarness(t)
	named(h)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, taken, _ := net.SplitHostPort(l.Addr().String())
	h.wantError(h.run("port-forward", "box", ":80", taken+":81"), 1, "listening for port 81", "in use")
	h.wantError(h.run("port-forward", "none", "80"), 1, "no sandbox")
}

func TestHTTP(t *testing.T) {
	h := newHarness(t)
	named(h)
	h.f.inside.ports = map[string]func(io.ReadWriter){"8000": serveOneRequest}
	h.want(h.run("http", "box", "localhost:8000/a%20b?c=d"), "GET /a%20b?c=d localhost:8000 \"\"\n", "", 0)
	h.want(h.run("http", "box", ":8000/x", "-d", "some", "-H", "Host: other", "-H", "X-Word: w"), "POST /x other \"w\"\nsome", "", 0)
	h.stdin = strings.NewReader("piped")
	h.want(h.run("http", "box", "put", ":8000/", "-d", "@-"), "PUT / localhost:8000 \"\"\npiped", "", 0)
	file := writeFile(t, "data", "of a file", 0o600)
	h.want(h.run("http", "box", "PUT", ":8000/", "-d", "@"+file), "PUT / localhost:8000 \"\"\nof a file", "", 0)
	if got := h.run("http", "-i", "box", ":8000/fail"); got.code != 0 || !strings.HasPrefix(got.stdout, "HTTP/1.1 500 Internal Server Error\r\n") || !strings.Contains(got.stdout, "\r\n\r\nGET /fail") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("http", "--fail", "box", ":8000/fail"); got.code != exitHTTP || !strings.Contains(got.stderr, "500") {
		t.Fatalf("%+v", got)
	}
	var v answered
	if got := h.run("http", "--json", "box", ":8000/"); json.Unmarshal([]byte(got.stdout), &v) != nil || v.Status != 200 || !bytes.HasPrefix(v.Body, []byte("GET /")) {
		t.Fatalf("%+v", got)
	}
	h.wantError(h.run("http", "box", ":9/"), 1, "nothing listens on port 9")
	h.wantError(h.run("http", "box", "http://example.org/"), 1, "must be localhost")
	h.f.inside.ports["7"] = func(c io.ReadWriter) { io.Copy(io.Discard, c) } // never answers
	h.wantError(h.run("http", "--timeout", "100ms", "box", ":7/"), 1, "in time")
}

// serveOneRequest answers with what it was asked.
func serveOneRequest(c io.ReadWriter) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	body, _ := io.ReadAll(r.Body)
	status := "200 OK"
	if strings.HasPrefix(r.URL.Path, "/fail") {
		status = "500 Internal Server Error"
	}
	io.WriteString(c, "HTTP/1.1 "+status+"\r\nConnection: close\r\n\r\n"+r.Method+" "+r.RequestURI+" "+r.Host+" \""+r.Header.Get("X-Word")+"\"\n"+string(body))
}
