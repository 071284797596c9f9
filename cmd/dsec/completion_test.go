package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	dsecv1 "dsec/api/dsec/v1"
)

// offered is what is offered behind these words; the last may be "".
func (h *harness) offered(words ...string) []string {
	h.t.Helper()
	got := h.run(append([]string{"completion", "--", "words"}, words...)...)
	if got.code != 0 || got.stderr != "" {
		h.t.Errorf("%q: %+v", words, got)
	}
	return strings.Fields(got.stdout)
}

func TestCompletion(t *testing.T) {
	h := newHarness(t)
	named := h.f.add(func(s *dsecv1.Sandbox) { s.Spec.Name = "worker" }).GetId()
	other := h.f.add(func(s *dsecv1.Sandbox) { s.Spec.Name = "x; touch /tmp/$(id)" }).GetId()
	for _, c := range []struct {
		words []string
		want  []string
	}{
		{[]string{"sh"}, []string{"shell"}},
		{[]string{"session", ""}, []string{"create", "ls", "rm"}},
		{[]string{"exec", ""}, []string{named, other, "worker"}},
		{[]string{"exec", "wo"}, []string{"worker"}},
		{[]string{"exec", "-it", "wo"}, []string{"worker"}},
		{[]string{"exec", "worker", ""}, nil}, // the command's own
		{[]string{"exec", "worker", "ls", "--"}, nil},
		{[]string{"rm", "worker", "wo"}, []string{"worker"}}, // and so on
		{[]string{"top", "worker", ""}, nil},
		{[]string{"cp", "wo"}, []string{"worker:"}},
		{[]string{"ps", "--no-t"}, []string{"--no-trunc"}},
		{[]string{"ps", "--label", ""}, nil},
		{[]string{"completion", ""}, []string{"bash", "fish", "zsh"}},
		{[]string{"no-such", ""}, nil},
		{[]string{"ps", "--no-such", "--", ""}, nil},
	} {
		got := h.offered(c.words...)
		slices.Sort(got)
		slices.Sort(c.want)
		if !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.words, got, c.want)
		}
	}
	if got := h.offered(""); !slices.Contains(got, "run") || slices.Contains(got, "words") {
		t.Errorf("commands: %q", got)
	}
	h.f.environments["base/debian:12"] = &dsecv1.Environment{Kind: "base", Name: "debian:12@sha256:" + strings.Repeat("0", 64)}
	h.f.environments["workspace/w:1"] = &dsecv1.Environment{Kind: "workspace", Name: "w:1"}
	images := h.offered("run", "")
	if !slices.Equal(images, []string{"debian:12"}) || !slices.Equal(images, h.offered("run", "-d", "--name", "x", "")) || !slices.Equal(images, h.offered("image", "rm", "")) {
		t.Errorf("images: %q", images)
	}
	if got := h.offered("run", "--workspace", ""); !slices.Equal(got, []string{"w:1"}) {
		t.Errorf("workspaces: %q", got)
	}
	h.f.server.Close()
	if got := h.offered("exec", ""); len(got) > 0 {
		t.Errorf("of no platform: %q", got)
	}
}

func TestCompletionOfContexts(t *testing.T) {
	h := bareHarness(t)
	h.vars["DSEC_CONFIG"] = writeFile(t, "config.json", `{"current":"a","contexts":{"a":{"url":"http://a","api_key":"k"},"b2":{"url":"http://b","api_key":"k"}}}`, 0o600)
	if got := h.offered("ps", "--context", ""); !slices.Equal(got, []string{"a", "b2"}) {
		t.Errorf("%q", got)
	}
	if got := h.offered("ps", "--context=b"); !slices.Equal(got, []string{"--context=b2"}) {
		t.Errorf("%q", got)
	}
	h.wantError(h.run("completion", "tcsh"), exitUsage, "bash, fish, zsh")
}

// The script in a real bash, with words that bash itself cuts at : and =.
func TestCompletionInBash(t *testing.T) {
	dir := t.TempDir()
	fake := "#!/bin/sh\nprintf '%s|' \"$@\" >" + dir + "/asked\ncat " + dir + "/answer\n"
	if err := os.WriteFile(filepath.Join(dir, "dsec"), []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ line, asked, answer, want string }{
		{"dsec ru", "completion|--|words|ru|", "run\n", "run\n"},
		{"dsec exec ", "completion|--|words|exec||", "s1\nworker\n", "s1\nworker\n"},
		{"dsec run debian:", "completion|--|words|run|debian:|", "debian:12\ndebian:13\n", "12\n13\n"},
		{"dsec ps --context=b", "completion|--|words|ps|--context=b|", "--context=b2\n", "b2\n"},
		{"dsec exec x* $HOME", "completion|--|words|exec|x*|$HOME|", "", ""},
	} {
		if err := os.WriteFile(filepath.Join(dir, "answer"), []byte(c.answer), 0o600); err != nil {
			t.Fatal(err)
		}
		script := completionScripts["bash"] + "compopt() { :; }\nCOMP_LINE=$1 COMP_POINT=${#1}\n_dsec\n((${#COMPREPLY[@]})) && printf '%s\\n' \"${COMPREPLY[@]}\"\ntrue\n"
		cmd := exec.Command("bash", "--norc", "-uc", script, "bash", c.line)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		asked, _ := os.ReadFile(filepath.Join(dir, "asked"))
		if err != nil || string(out) != c.want || string(asked) != c.asked {
			t.Errorf("%q: %v, asked %q, %q", c.line, err, asked, out)
		}
	}
}
