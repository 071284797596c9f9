package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// idOf is a valid-looking id with a chosen middle, for golden outputs.
func fixedID(middle string) string { return "sabcde" + middle + strings.Repeat("a", 18-len(middle)) }

func listed(h *harness) {
	h.f.add(func(s *dsecv1.Sandbox) {
		s.Id, s.RunningCommands, s.Spec.Name = fixedID("one"), 2, "first"
		s.Spec.Labels = map[string]string{"job": "1"}
	})
	h.f.add(func(s *dsecv1.Sandbox) {
		s.Id, s.State, s.CreatedAt = fixedID("two"), dsecv1.State_STATE_CREATING, timestamppb.New(testTime)
		s.Spec.Image = "python:3.12"
	})
	h.f.add(func(s *dsecv1.Sandbox) {
		s.Id, s.CreatedAt, s.Spec.Name = fixedID("three"), timestamppb.New(testTime.Add(-49*time.Hour)), "evil\x1b[2J\nname"
		s.Spec.Labels = map[string]string{"job": "1"}
	})
	h.f.add(func(s *dsecv1.Sandbox) {
		s.Id, s.State, s.Reason = fixedID("four"), dsecv1.State_STATE_FAILED, &dsecv1.Reason{Code: "oom"}
	})
}

func TestPs(t *testing.T) {
	h := newHarness(t)
	listed(h)
	h.want(h.run("ps"), `ID             IMAGE                 STATUS     CREATED         COMMANDS   NAME
sabcdetwoaaa   python:3.12           creating   now             0
sabcdeoneaaa   debian@abababababab   ready      3 minutes ago   2          first
sabcdethreea   debian@abababababab   ready      2 days ago      0          evil [2J name
`, "", 0)
	h.want(h.run("ps", "-aq"), fixedID("two")+"\n"+fixedID("four")+"\n"+fixedID("one")+"\n"+fixedID("three")+"\n", "", 0)
	h.want(h.run("ps", "-q", "-l", "job=1"), fixedID("one")+"\n"+fixedID("three")+"\n", "", 0)
	if got := h.run("ps", "-a", "--no-trunc"); !strings.Contains(got.stdout, fixedID("four")+"   debian@sha256:abab") || !strings.Contains(got.stdout, "failed (oom)") {
		t.Fatalf("%+v", got)
	}
	h.wantError(h.run("ps", "x"), exitUsage, "too many")
}

func TestPsJSON(t *testing.T) {
	h := newHarness(t)
	listed(h)
	got := h.run("ps", "-a", "--json")
	lines := strings.Split(strings.TrimSuffix(got.stdout, "\n"), "\n")
	if len(lines) != 4 {
		t.Fatalf("%+v", got)
	}
	for _, l := range lines {
		var s struct {
			ID              string
			State           string
			RunningCommands *string // zero values are printed too, 64-bit numbers as the API does
		}
		if err := json.Unmarshal([]byte(l), &s); err != nil || s.ID == "" || s.State == "" || s.RunningCommands == nil {
			t.Fatalf("%q: %v", l, err)
		}
	}
}

func TestPsEmpty(t *testing.T) {
	h := newHarness(t)
	h.want(h.run("ps"), "ID   IMAGE   STATUS   CREATED   COMMANDS   NAME\n", "", 0)
	h.want(h.run("ps", "--json"), "", "", 0)
}

func TestRm(t *testing.T) {
	h := newHarness(t)
	listed(h)
	h.wantError(h.run("rm"), exitUsage, "--all")
	h.wantError(h.run("rm", "--all", "x"), exitUsage, "exclude")
	h.wantError(h.run("rm", "sabcdet"), 1, "more than one")
	h.want(h.run("rm", "-f", "first", "sabcdeone"), fixedID("one")+"\n", "", 0)
	got := h.run("rm", "nonesuch", "sabcdetwo")
	if got.code != 1 || got.stdout != fixedID("two")+"\n" || !strings.Contains(got.stderr, "nonesuch") {
		t.Fatalf("%+v", got)
	}
	h.want(h.run("rm", "-l", "job=1"), fixedID("three")+"\n", "", 0)
	h.add3()
	if got := h.run("rm", "--all", "--json"); got.code != 0 || strings.Count(got.stdout, `"state":"STATE_STOPPED"`) != 3 {
		t.Fatalf("%+v", got)
	}
	h.want(h.run("rm", "--all"), "", "", 0)
}

func TestRmOfAPlatformThatIsAway(t *testing.T) {
	h := newHarness(t)
	h.f.server.Close()
	for _, refs := range [][]string{{"one", "two", "three"}, {string(sandbox.NewID("abcde")), string(sandbox.NewID("abcde"))}, {"--all"}} {
		got := h.run(append([]string{"rm"}, refs...)...)
		h.wantError(got, 1, "does not answer")
		if n := strings.Count(got.stderr, "\n"); n != 1 {
			t.Errorf("%v: said %d times: %s", refs, n, got.stderr)
		}
	}
}

func TestRmInterrupted(t *testing.T) {
	for _, args := range [][]string{{"rm", "first"}, {"rm", "--all"}} {
		h := newHarness(t)
		listed(h)
		asked := make(chan struct{}, 8)
		h.f.setIntercept(func(_ http.ResponseWriter, r *http.Request) bool {
			io.Copy(io.Discard, r.Body) // else the server does not notice that the client goes
			asked <- struct{}{}
			<-r.Context().Done()
			return true
		})
		done := h.start(args...)
		recv(t, asked)
		h.interrupt()
		h.want(recv(t, done), "", "", 130)
	}
}

func TestExecDetached(t *testing.T) {
	h := newHarness(t)
	id := fixedID("one")
	h.f.add(func(s *dsecv1.Sandbox) { s.Id = id })
	got := h.run("exec", "-d", id, "hang")
	command := strings.TrimSuffix(got.stdout, "\n")
	if got.code != 0 || command == "" || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	h.want(h.run("kill", id, command), command+"\n", "", 0)
	h.wantError(h.run("exec", "-d", "-i", id, "hang"), exitUsage, "contradicts")
	h.wantError(h.run("exec", "-d", id, "nonesuch"), 127, "nonesuch")
}

func TestShortRef(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("ab", 32)
	for ref, want := range map[string]string{
		"debian": "debian", "debian:12": "debian:12", "debian:12" + digest: "debian:12", "debian" + digest: "debian@abababababab",
		"team/debian:12" + digest: "team/debian:12",
	} {
		if got := shortRef(ref); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}

func (h *harness) add3() {
	for range 3 {
		h.f.add(nil)
	}
}

func TestResolvePrefersTheLiving(t *testing.T) {
	h := newHarness(t)
	h.f.add(func(s *dsecv1.Sandbox) { s.Id, s.State = fixedID("xa"), dsecv1.State_STATE_STOPPED })
	h.f.add(func(s *dsecv1.Sandbox) { s.Id = fixedID("xb") })
	h.want(h.run("exec", "sabcdex", "echo", "alive"), "alive\n", "", 0)
	h.wantError(h.run("exec", "sabcdexa", "echo"), 125, "no such sandbox")
	bad := []byte(sandbox.NewID("abcde"))
	bad[10] ^= 1
	h.wantError(h.run("exec", string(bad), "true"), 125, "no sandbox")
}

func TestInspect(t *testing.T) {
	h := newHarness(t)
	listed(h)
	h.f.environments["base/python:3"] = &dsecv1.Environment{Kind: "base", Name: "python:3"}
	got := h.run("inspect", "first", "image/python:3")
	var all []map[string]any
	if err := json.Unmarshal([]byte(got.stdout), &all); err != nil || len(all) != 2 || all[0]["id"] != fixedID("one") || all[1]["name"] != "python:3" {
		t.Fatalf("%+v, %v", got, err)
	}
	if got := h.run("inspect", "--json", "first"); strings.Count(got.stdout, "\n") != 1 || got.code != 0 {
		t.Fatalf("%+v", got)
	}
	h.wantError(h.run("inspect", "workspace/none:1"), 1, "no workspace none:1")
	h.wantError(h.run("inspect"), exitUsage, "missing")
}

func TestKill(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	for _, id := range []string{"aa1", "aa2", "bb"} {
		h.f.mu.Lock()
		h.f.startLocked(s.Id, id, &dsecv1.Command{}, []string{"hang"}, h.f.programs["hang"])
		h.f.mu.Unlock()
	}
	h.wantError(h.run("kill", s.Id, "aa"), 1, "more than one")
	h.wantError(h.run("kill", s.Id, "zz"), 1, "no such command")
	h.wantError(h.run("kill", "-s", "NONE", s.Id), exitUsage, "not a signal")
	h.want(h.run("kill", "-s", "SIGTERM", s.Id, "aa1"), "aa1\n", "", 0)
	c, err := h.f.command(s.Id, "aa1")
	if err != nil || c.await(t.Context(), -1, 0).Running {
		t.Fatal("aa1 still runs")
	}
	h.want(h.run("kill", s.Id), "bb\naa2\n", "", 0)
}

func TestSignalNumber(t *testing.T) {
	for s, want := range map[string]int32{"KILL": 0, "9": 0, "term": 15, "SIGINT": 2, "10": 10, "64": 64} {
		if got, err := signalNumber(s); err != nil || got != want {
			t.Errorf("%s: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "0", "-1", "65", "9x", "x9", "1 2"} {
		if got, err := signalNumber(s); err == nil {
			t.Errorf("%q: %d, want an error", s, got)
		}
	}
}

func TestLogs(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	h.wantError(h.run("logs", s.Id), 1, "no command has been run")
	h.run("exec", s.Id, "both")
	h.run("exec", s.Id, "echo", "last")
	h.want(h.run("logs", s.Id), "last\n", "", 0)
	c := h.f.commands
	var first string
	for name, k := range c {
		if k.result.Description == "both" {
			first = name[len(s.Id)+1:]
		}
	}
	h.want(h.run("logs", s.Id, first[:20]), "out\x00\xff", "err\r\n", 0)
	h.want(h.run("logs", "--stream=stderr", s.Id, first), "", "err\r\n", 0)
	h.wantError(h.run("logs", "--stream=x", s.Id), exitUsage, "stdout, stderr or both")
	got := h.run("logs", "--list", s.Id)
	lines := strings.Split(got.stdout, "\n")
	if !strings.Contains(lines[1], "echo last") || !strings.Contains(lines[2], "exit 3") || !strings.Contains(lines[2], "5 B") {
		t.Fatalf("%+v", got)
	}
	if got := h.run("logs", "--json", s.Id, first); !strings.Contains(got.stdout, `"exitCode":3`) {
		t.Fatalf("%+v", got)
	}
}

func TestLogsFollow(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	next := make(chan string)
	h.f.programs["live"] = func(p *process) int {
		for text := range next {
			io.WriteString(p.stdout, text)
		}
		return 0
	}
	h.f.mu.Lock()
	h.f.startLocked(s.Id, "live", &dsecv1.Command{}, []string{"live"}, h.f.programs["live"])
	h.f.mu.Unlock()
	saw := h.stdout.saw("one ")
	done := h.start("logs", "-f", s.Id)
	next <- "one "
	recv(t, saw)
	next <- "two"
	close(next)
	h.want(recv(t, done), "one two", "", 0)
}

func TestCpOut(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	data := strings.Repeat("0123456789", 100)
	h.f.files["/etc/data"] = fakeFile{data: []byte(data), mode: "4751", mtime: "1"}
	dir := t.TempDir()
	for _, to := range []string{dir, dir + "/copy"} {
		h.want(h.run("cp", s.Id+":/etc/data", to), "", "", 0)
	}
	for _, name := range []string{"data", "copy"} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		info, serr := os.Stat(filepath.Join(dir, name))
		if err != nil || serr != nil || string(got) != data || info.Mode() != 0o751 {
			t.Fatalf("%s: %d bytes, %v, %v", name, len(got), info, err)
		}
	}
	h.f.cutOutput = 300 // goes on after a lost connection
	h.want(h.run("cp", s.Id+":/etc/data", dir), "", "", 0)
	if got, err := os.ReadFile(filepath.Join(dir, "data")); err != nil || string(got) != data {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	h.f.cutOutput = 0
	h.wantError(h.run("cp", s.Id+":/none", dir), 1, "there is no /none")
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Fatalf("left: %v, %v", entries, err)
	}
	h.want(h.run("cp", s.Id+":/etc/data", "/dev/null"), "", "", 0)
	if info, err := os.Stat("/dev/null"); err != nil || info.Mode().IsRegular() {
		t.Fatalf("/dev/null was replaced: %v, %v", info, err)
	}
}

func TestCpOutOfAChangingFile(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(nil)
	h.f.files["/f"] = fakeFile{data: []byte(strings.Repeat("x", 100)), mode: "644", mtime: "1"}
	h.f.cutOutput = 60
	h.f.setIntercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.FormValue("offset") != "" {
			h.f.mu.Lock()
			h.f.files["/f"] = fakeFile{data: []byte(strings.Repeat("y", 100)), mode: "644", mtime: "2"}
			h.f.mu.Unlock()
		}
		return false
	})
	to := filepath.Join(t.TempDir(), "f")
	h.wantError(h.run("cp", s.Id+":/f", to), 1, "changed while it was copied")
	if _, err := os.Stat(to); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("half a file is left: %v", err)
	}
}

func TestCpIn(t *testing.T) {
	h := newHarness(t)
	s := h.f.add(func(s *dsecv1.Sandbox) { s.Spec.Name = "box" })
	_ = s
	local := writeFile(t, "a:b", "content", 0o750)
	sum := sha256.Sum256([]byte("content"))
	got := h.run("cp", "--json", "-u", "nobody", local, "box:/tmp/")
	h.want(got, `{"from":"`+local+`","to":"box:/tmp/","bytes":7}`+"\n", "", 0)
	if f := h.f.files["/tmp/a:b"]; string(f.data) != "content" || f.mode != "0750" || f.user != "nobody" || f.mtime != hex.EncodeToString(sum[:]) {
		t.Fatalf("%+v", f)
	}
	empty := writeFile(t, "empty", "", 0o600)
	h.want(h.run("cp", empty, "box:/e"), "", "", 0)
	if f := h.f.files["/e"]; len(f.data) != 0 || f.mode != "0600" {
		t.Fatalf("%+v", f)
	}
	h.wantError(h.run("cp", "-", "box:/none"), 1, "no directory /none")
	h.wantError(h.run("cp", local, "box:"), exitUsage, "path in the sandbox is empty")
	h.wantError(h.run("cp", "", "box:/x"), exitUsage, "local path is empty")
	h.wantError(h.run("cp", "box:/x", "-", "--json"), exitUsage, "both want standard output")
	h.wantError(h.run("cp", "box:/x", "box:/y"), exitUsage, "exactly one")
	h.wantError(h.run("cp", "./x:/x", "y"), exitUsage, "exactly one")
	h.wantError(h.run("cp", "/none", "box:/y"), 1, "/none")
	h.stdin = &brokenReader{}
	h.wantError(h.run("cp", "-", "box:/tmp"), 1, "broken disk")
	if _, ok := h.f.inside.archives["PUT /tmp"]; ok {
		t.Fatal("an archive of a broken input was unpacked")
	}
}

func TestEnvironmentCreateFromDir(t *testing.T) {
	h := newHarness(t)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc", "motd"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := h.run("image", "create", "lib/mine:1", "--from-dir", dir, "--user=nobody", "-w", "/src", "-e", "LANG=C.UTF-8")
	if got.code != 0 || got.stderr != "" || !strings.HasPrefix(got.stdout, "image lib/mine:1  sha256:cdcd") || !strings.Contains(got.stdout, "7 entries") {
		t.Fatalf("%+v", got)
	}
	e := h.f.environments["base/lib/mine:1"]
	if e.Config.User != "nobody" || e.Config.Workdir != "/src" || e.Config.Env["LANG"] != "C.UTF-8" {
		t.Fatalf("%v", e)
	}
	names := make(map[string]string)
	r := tar.NewReader(bytes.NewReader(h.f.archives["base/lib/mine:1"]))
	for {
		hdr, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		names[strings.TrimPrefix(hdr.Name, "./")] = string(content)
	}
	if names["etc/motd"] != "hello" {
		t.Fatalf("the archive has %q", names)
	}
}

func TestEnvironmentCreateFromTar(t *testing.T) {
	h := newHarness(t)
	file := writeFile(t, "x.tar", "bytes of an archive", 0o600)
	if got := h.run("workspace", "create", "w", "--from-tar", file, "--json"); got.code != 0 || !strings.Contains(got.stdout, `"name":"w:latest"`) {
		t.Fatalf("%+v", got)
	}
	h.stdin = strings.NewReader("more bytes")
	got := h.run("toolkit", "create", "dev:2", "--from-tar", "-")
	if got.code != 0 || !strings.Contains(got.stderr, "2 entries were left out, for example dev/sda") {
		t.Fatalf("%+v", got)
	}
	if string(h.f.archives["workspace/w:latest"]) != "bytes of an archive" || string(h.f.archives["toolkit/dev:2"]) != "more bytes" {
		t.Fatalf("%q", h.f.archives)
	}
}

func TestEnvironmentCreateFails(t *testing.T) {
	h := newHarness(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "large"), make([]byte, 8<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	h.wantError(h.run("image", "create", "refused:1", "--from-dir", dir), 1, "the archive is refused")
	h.wantError(h.run("image", "create", "x", "--from-dir", filepath.Join(dir, "large")), exitUsage, "--from-tar")
	h.wantError(h.run("image", "create", "x", "--from-dir", filepath.Join(dir, "none")), 1, "none")
	h.wantError(h.run("image", "create", "x"), exitUsage, "--from-dir")
	h.wantError(h.run("image", "create", "--from-dir", dir), exitUsage, "name is missing")
	h.wantError(h.run("image", "create", "../x", "--from-dir", dir), 1, "not a name")
	h.wantError(h.run("image", "create", "x@sha256:"+strings.Repeat("ab", 32), "--from-dir", dir), exitUsage, "tag")
	h.stdin = &brokenReader{}
	h.wantError(h.run("image", "create", "x", "--from-tar", "-"), 1, "broken disk")
	h.f.setIntercept(func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) })
	h.wantError(h.run("image", "create", "x", "--from-dir", dir), 1, "does not answer")
	if len(h.f.environments) != 0 {
		t.Fatalf("%v", h.f.environments)
	}
}

func TestEnvironmentInterrupt(t *testing.T) {
	h := newHarness(t)
	r, w := io.Pipe()
	h.stdin = r
	done := h.start("image", "create", "x", "--from-tar", "-")
	if _, err := w.Write([]byte("begin")); err != nil {
		t.Fatal(err)
	}
	h.interrupt()
	h.want(recv(t, done), "", "", 130)
	w.Close()
	if len(h.f.environments) != 0 {
		t.Fatalf("%v", h.f.environments)
	}
}

func TestEnvironmentLsInspectRm(t *testing.T) {
	h := newHarness(t)
	file := writeFile(t, "x.tar", "x", 0o600)
	for _, name := range []string{"b:2", "a:1"} {
		h.run("image", "create", name, "--from-tar", file)
	}
	h.want(h.run("image", "ls"), `NAME   DIGEST         SIZE    ENTRIES   CREATED
a:1    cdcdcdcdcdcd   3 MiB   7         2 hours ago
b:2    cdcdcdcdcdcd   3 MiB   7         2 hours ago
`, "", 0)
	h.want(h.run("image", "ls", "-q"), "a:1\nb:2\n", "", 0)
	h.want(h.run("toolkit", "ls", "-q"), "", "", 0)
	if got := h.run("image", "ls", "--json"); strings.Count(got.stdout, "\n") != 2 {
		t.Fatalf("%+v", got)
	}
	if got := h.run("image", "inspect", "a:1"); !strings.Contains(got.stdout, `"name": "a:1"`) {
		t.Fatalf("%+v", got)
	}
	got := h.run("image", "rm", "none:1", "a:1")
	if got.code != 1 || got.stdout != "a:1\n" || !strings.Contains(got.stderr, "none:1") {
		t.Fatalf("%+v", got)
	}
}
