package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"dsec/sandbox"
)

func vars(kv ...string) func(string) string {
	return func(k string) string {
		for i := 0; i < len(kv); i += 2 {
			if kv[i] == k {
				return kv[i+1]
			}
		}
		return ""
	}
}

func TestPath(t *testing.T) {
	for _, c := range []struct {
		name string
		env  []string
		want string
	}{
		{"explicit", []string{"DSEC_CONFIG", "x.json", "HOME", "/h"}, "x.json"},
		{"xdg", []string{"XDG_CONFIG_HOME", "/x", "HOME", "/h"}, "/x/dsec/config.json"},
		{"relative xdg is ignored", []string{"XDG_CONFIG_HOME", "x", "HOME", "/h"}, "/h/.config/dsec/config.json"},
		{"home", []string{"HOME", "/h"}, "/h/.config/dsec/config.json"},
	} {
		if got, err := Path(vars(c.env...)); err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", c.name, got, err, c.want)
		}
	}
	if _, err := Path(vars()); sandbox.ReasonOf(err) != "no_config_path" {
		t.Errorf("without any variable: %v", err)
	}
}

func TestSetContextRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "config.json")
	local := Context{URL: "http://127.0.0.1:7070", APIKey: "dsec_1"}
	lab := Context{URL: "unix:///run/x.sock", APIKey: "dsec_2"}
	if err := SetContext(path, "local", local); err != nil {
		t.Fatal(err)
	}
	if err := SetContext(path, "lab", lab); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	want := Config{Current: "lab", Contexts: map[string]Context{"local": local, "lab": lab}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := RemoveContext(path, "lab"); err != nil {
		t.Fatal(err)
	}
	if got, _ = Load(path); got.Current != "" || len(got.Contexts) != 1 {
		t.Fatalf("after removing the current one: %+v", got)
	}
	assertMode(t, path, 0o600)
	assertMode(t, filepath.Dir(path), 0o700)
	assertMode(t, filepath.Dir(filepath.Dir(path)), 0o700)
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".config-*"))
	if err != nil || len(left) != 0 {
		t.Fatalf("temporary files left: %v, %v", left, err)
	}
}

func assertMode(t *testing.T, path string, want fs.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != want {
		t.Fatalf("%s has mode %v, %v; want %v", path, info.Mode(), err, want)
	}
}

func TestSaveFollowsLinkAndTightensMode(t *testing.T) {
	dir := t.TempDir()
	real, link := filepath.Join(dir, "real.json"), filepath.Join(dir, "config.json")
	if err := os.WriteFile(real, []byte(`{"current":"","contexts":{}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, link); err != nil {
		t.Fatal(err)
	}
	if err := SetContext(link, "local", Context{URL: "http://h", APIKey: "k"}); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Fatalf("the link was replaced: %v, %v", info, err)
	}
	assertMode(t, real, 0o600)
}

func TestLoadRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	for _, c := range []struct{ name, content, says string }{
		{"unknown field", `{"current":"","contexts":{},"colour":1}`, "colour"},
		{"unknown field below", `{"contexts":{"a":{"url":"http://h","key":"k"}}}`, "key"},
		{"empty", ``, "empty"},
		{"wrong type", "{\n\"current\": 7}", "line 2"},
		{"syntax", "{\n\n,", "line 3"},
		{"two values", `{} {}`, "after"},
		{"no such current", `{"current":"x","contexts":{}}`, `"x"`},
		{"bad url", `{"contexts":{"a":{"url":"ftp://h"}}}`, "url must be"},
		{"password in the url", `{"contexts":{"a":{"url":"http://u:secret@h"}}}`, "url must be"},
		{"white space in the key", `{"contexts":{"a":{"url":"http://h","api_key":"dsec_ secret"}}}`, "white space"},
		{"bad name", `{"contexts":{"../a":{"url":"http://h"}}}`, "context name"},
		{"too large", `{"current":"` + strings.Repeat("x", maxSize) + `"}`, "over"},
	} {
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load(path)
		if sandbox.ReasonOf(err) != "bad_config" || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want it to say %q and the path", c.name, err, c.says)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the message repeats a secret: %v", c.name, err)
		}
		if err := SetContext(path, "local", Context{URL: "http://h"}); err == nil {
			t.Errorf("%s: SetContext replaced a file that it did not understand", c.name)
		}
	}
}

func TestLoadMissingIsEmpty(t *testing.T) {
	c, err := Load(filepath.Join(t.TempDir(), "none"))
	if err != nil || c.Current != "" || c.Contexts != nil {
		t.Fatalf("%+v, %v", c, err)
	}
}

func TestSaveFailureLeavesOldFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	if err := SetContext(path, "local", Context{URL: "http://h", APIKey: "k"}); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := SetContext(path, "bad name", Context{URL: "http://h"}); sandbox.ReasonOf(err) != "bad_config" {
		t.Fatalf("bad name: %v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || string(before) != string(after) {
		t.Fatalf("the file changed: %s, %v", after, err)
	}
	// A directory in the way of the file: the rename fails and the temporary file is removed.
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Save(filepath.Join(dir, "d"), Config{}); sandbox.ReasonOf(err) != "unwritable_config" {
		t.Fatalf("saving over a directory: %v", err)
	}
	if err := Save(filepath.Join(path, "below", "file"), Config{}); sandbox.ReasonOf(err) != "unwritable_config" {
		t.Fatalf("saving below a file: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Fatalf("left: %v, %v", entries, err)
	}
}

// A resolveCase is one line of testdata/cases.json, which says what the fields mean.
type resolveCase struct {
	Name    string                     `json:"name"`
	File    json.RawMessage            `json:"file"`
	Files   map[string]json.RawMessage `json:"files"`
	Env     map[string]string          `json:"env"`
	Context string                     `json:"context"`
	Want    Context                    `json:"want"`
	Error   string                     `json:"error"`
}

func TestResolve(t *testing.T) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		About []string      `json:"about"`
		Cases []resolveCase `json:"cases"`
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&table); err != nil || len(table.Cases) < 30 {
		t.Fatalf("%d cases, %v", len(table.Cases), err)
	}
	for _, c := range table.Cases {
		t.Run(c.Name, func(t *testing.T) {
			got, err := Resolve(c.environment(t), c.Context)
			switch {
			case c.Error != "" && sandbox.ReasonOf(err) != c.Error:
				t.Errorf("%+v, %v; want reason %s", got, err, c.Error)
			case c.Error == "" && (err != nil || !sameURL(got.URL, c.Want.URL) || got.APIKey != c.Want.APIKey || got.Origin == ""):
				t.Errorf("%+v, %v; want %+v", got, err, c.Want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the message repeats a secret: %v", err)
			}
		})
	}
}

// environment writes the files of a case and gives its variables.
func (c *resolveCase) environment(t *testing.T) func(string) string {
	dir := t.TempDir()
	if len(c.Files) == 0 {
		c.Env[EnvPath] = "$DIR/config.json"
	}
	if c.File != nil {
		c.Files = map[string]json.RawMessage{"config.json": c.File}
	}
	for name, content := range c.Files {
		var text string
		if json.Unmarshal(content, &text) == nil { // as it is
			content = []byte(text)
		}
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return func(k string) string { return strings.ReplaceAll(c.Env[k], "$DIR", dir) }
}

func TestNotConfiguredNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	_, err := Resolve(vars(EnvPath, path), "")
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "sudo -E dsec up") {
		t.Fatal(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"current":"local","contexts":{"local":{"url":"http://127.0.0.1:7070","api_key":"dsec_00"}}}`))
	f.Add([]byte(`{"contexts":{"a":{"url":"unix:///x"}}}`))
	f.Add([]byte("{\n\"current\": 7}"))
	f.Add([]byte(`{"contexts":null}{`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err != nil {
			return
		}
		// What is accepted can be written and is the same afterwards.
		path := filepath.Join(dir, "config.json")
		if err := Save(path, c); err != nil {
			t.Fatal(err)
		}
		again, err := Load(path)
		if err != nil || again.Current != c.Current || len(again.Contexts) != len(c.Contexts) {
			t.Fatalf("%+v became %+v, %v", c, again, err)
		}
		for name := range c.Contexts {
			if again.Contexts[name] != c.Contexts[name] {
				t.Fatalf("context %q: %+v became %+v", name, c.Contexts[name], again.Contexts[name])
			}
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	})
}
