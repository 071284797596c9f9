// Package dsec checks who may import whom. The rules are the architecture: see ARCHITECTURE.md.
package dsec

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Deps       []string
}

func list(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Standard,Imports,Deps"}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	var pkgs []goPackage
	for {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// under reports whether path is the package prefix or lies below it.
func under(path, prefix string) bool { return path == prefix || strings.HasPrefix(path, prefix+"/") }

func TestRooms(t *testing.T) {
	rules := []struct {
		from   string   // packages at or below
		not    []string // may not import, directly or through others
		except []string // unless the importer is at or below one of these
		why    string
	}{
		{"dsec/internal/control", []string{"dsec/internal/edge", "dsec/internal/linux"}, nil,
			"control and edge speak api/ only; control builds on any OS"},
		{"dsec/internal/edge", []string{"dsec/internal/control"}, nil,
			"control and edge speak api/ only"},
		{"dsec/internal/edge/driver", []string{"dsec/internal/image", "net/http", "dsec/internal/edge/guest"}, []string{"dsec/internal/edge/driver/container"},
			"a driver gets a rootfs value and gives a handle: it knows no image store, HTTP or guest protocol"},
		{"dsec/internal/edge/driver/container", []string{"dsec/internal/image", "net/http", "dsec/internal/edge/guest", "dsec/internal/edge/driver/fake"}, nil,
			"a driver knows no sibling, no HTTP, no image store"},
		{"dsec/internal/image", []string{"dsec/internal/edge", "dsec/internal/control"}, nil,
			"image emits data and imports neither edge nor control"},
		{"dsec/internal/rootfs", []string{"dsec/internal"}, nil, "rootfs is plain data"},
		{"dsec/internal/aether", []string{"google.golang.org/grpc", "net/http", "database/sql", "dsec/internal/edge", "dsec/internal/control", "expvar", "runtime/pprof"}, nil,
			"aether is one of thousands and runs beside hostile code"},
		{"dsec/cmd/aether", []string{"google.golang.org/grpc", "net/http", "database/sql", "dsec/internal/edge", "dsec/internal/control", "expvar", "runtime/pprof"}, nil,
			"aether is one of thousands and runs beside hostile code"},
	}
	pkgs := list(t, "./...")
	for _, r := range rules {
		for _, p := range pkgs {
			if !under(p.ImportPath, r.from) || underAny(p.ImportPath, r.except) {
				continue
			}
			for _, d := range p.Deps {
				for _, bad := range r.not {
					if under(d, bad) && !under(d, r.from) {
						t.Errorf("%s imports %s: %s", p.ImportPath, d, r.why)
					}
				}
			}
		}
	}
}

func underAny(path string, prefixes []string) bool {
	for _, p := range prefixes {
		if under(path, p) {
			return true
		}
	}
	return false
}

func TestSandboxImportsStandardLibraryOnly(t *testing.T) {
	for _, p := range list(t, "-deps", "./sandbox") {
		if !p.Standard && p.ImportPath != "dsec/sandbox" {
			t.Errorf("dsec/sandbox depends on %s: the domain is the one package everything links", p.ImportPath)
		}
	}
}

func TestSystemCallsLiveInOneRoom(t *testing.T) {
	allowed := []string{"dsec/internal/linux", "dsec/internal/aether", "dsec/cmd/aether"}
	for _, p := range list(t, "./internal/...", "./cmd/...") {
		if underAny(p.ImportPath, allowed) {
			continue
		}
		for _, i := range p.Imports {
			if i == "golang.org/x/sys/unix" {
				t.Errorf("%s imports %s: system calls belong into internal/linux, where they are retried, wrapped and tested", p.ImportPath, i)
			}
		}
	}
}

func TestNoVagueNames(t *testing.T) {
	vague := map[string]bool{"common": true, "shared": true, "utils": true, "util": true, "helpers": true, "base": true, "types": true, "models": true, "manager": true, "misc": true}
	for _, p := range list(t, "./...") {
		for _, part := range strings.Split(p.ImportPath, "/") {
			if vague[part] {
				t.Errorf("%s: %q says nothing; name the package after what it provides", p.ImportPath, part)
			}
		}
	}
}
