// Package dsec checks who may import whom. The rules are the architecture: see ARCHITECTURE.md.
package dsec

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

type goPackage struct {
	ImportPath   string
	Dir          string
	Standard     bool
	Deps         []string
	TestImports  []string
	XTestImports []string
}

func list(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Standard,Deps,TestImports,XTestImports"}, args...)...)
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
		tests  bool     // nor may their tests
		why    string
	}{
		{"dsec/internal/control", []string{"dsec/internal/edge", "dsec/internal/linux"}, nil, true,
			"control and edge speak api/ only; control builds on any OS"},
		{"dsec/internal/edge", []string{"dsec/internal/control"}, nil, true,
			"control and edge speak api/ only"},
		{"dsec/internal/edge/driver", []string{"dsec/internal/image", "net/http", "dsec/internal/edge/guest"}, []string{"dsec/internal/edge/driver/container"}, false,
			"a driver gets a rootfs value and gives a handle: it knows no image store, HTTP or guest protocol"},
		{"dsec/internal/edge/driver/container", []string{"dsec/internal/image", "net/http", "dsec/internal/edge/guest", "dsec/internal/edge/driver/fake"}, nil, false,
			"a driver knows no sibling, no HTTP, no image store"},
		{"dsec/internal/image", []string{"dsec/internal/edge", "dsec/internal/control"}, nil, true,
			"image emits data and imports neither edge nor control"},
		{"dsec/internal/rootfs", []string{"dsec/internal"}, nil, true, "rootfs is plain data"},
		{"dsec/client", []string{"dsec/internal/edge", "dsec/internal/control", "dsec/internal/linux", "dsec/cmd"}, nil, false,
			"the client is any other program's too: it knows the platform by its public API, and builds on any OS"},
		{"dsec/internal/aether", []string{"google.golang.org/grpc", "net/http", "database/sql", "dsec/internal/edge", "dsec/internal/control", "expvar", "runtime/pprof"}, nil, false,
			"aether is one of thousands and runs beside hostile code"},
		{"dsec/cmd/aether", []string{"google.golang.org/grpc", "net/http", "database/sql", "dsec/internal/edge", "dsec/internal/control", "expvar", "runtime/pprof"}, nil, false,
			"aether is one of thousands and runs beside hostile code"},
	}
	pkgs := list(t, "-tags", "rootful", "./...")
	for _, r := range rules {
		for _, p := range pkgs {
			if !under(p.ImportPath, r.from) || underAny(p.ImportPath, r.except) {
				continue
			}
			imports := p.Deps
			if r.tests {
				imports = slices.Concat(p.Deps, p.TestImports, p.XTestImports)
			}
			for _, d := range imports {
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

// A source is one Go file, whatever it is built for.
type source struct {
	path string
	tree *ast.File
}

func (s source) room() string { return filepath.ToSlash(filepath.Dir(s.path)) }

func (s source) imports() map[string]string { // path to the name it has in the file
	m := make(map[string]string, len(s.tree.Imports))
	for _, i := range s.tree.Imports {
		p, _ := strconv.Unquote(i.Path.Value) // it was parsed
		name := path.Base(p)
		if i.Name != nil {
			name = i.Name.Name
		}
		m[p] = name
	}
	return m
}

func sources(t *testing.T, root string) (all []source) {
	t.Helper()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && p != "." || d.Name() == "testdata"):
			return fs.SkipDir
		case !strings.HasSuffix(p, ".go"):
			return nil
		}
		tree, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
		all = append(all, source{p, tree})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// functions is the functions of a package, on any system.
func functions(t *testing.T, dir string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, s := range sources(t, dir) {
		for _, d := range s.tree.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.IsExported() {
				all[f.Name.Name] = true
			}
		}
	}
	if !all["Mount"] || !all["Kill"] {
		t.Fatalf("%d functions in %s", len(all), dir)
	}
	return all
}

// TestSystemCallsLiveInOneRoom reads the files themselves: what is built for another system or only with a tag counts too.
func TestSystemCallsLiveInOneRoom(t *testing.T) {
	const why = "system calls belong into internal/linux, where they are retried, wrapped and tested"
	rooms := []string{"internal/linux", "internal/aether", "cmd/aether"}
	const anyOS = "the store builds on any OS, and this file only where there is the call"
	allowed := map[string]string{ // room and function
		"cmd/dsec Flock":                                       "the command builds on any Unix, and internal/linux does not",
		"cmd/dsec Kill":                                        "signals end the platform that a file names: as above",
		"cmd/dsec CloseOnExec":                                 "a descriptor that came from outside is made ours: as above",
		"internal/wire Write":                                  "aether links it, the edge links it; one attempt within the runtime's own RawConn, which retries",
		"internal/edge/failpoint Kill":                         "it kills this process and nothing else",
		"internal/image/store Flock":                           anyOS,
		"internal/image/store SyncFileRange":                   anyOS,
		"internal/image/treetest Lstat":                        "an independent walk, for tests: what it checks must not be what it uses",
		"internal/edge/driver/container/launchbench Getrusage": "it measures, and is linked into no binary",
	}
	allowedInTests := map[string]string{
		"internal/control Getrusage":    "a benchmark measures",
		"internal/edge/guest Getrusage": "a benchmark measures",
		"internal/edge/guest Mkfifo":    "as below",
		"internal/image/archive Mkfifo": "an archive is packed of what a user can make",
		"cmd/dsec Kill":                 "it signals itself",
		"cmd/dsec Dup":                  "a parent's descriptor is given as a parent does",
	}
	syscalls := functions(t, list(t, "syscall")[0].Dir)
	used := map[string]bool{}
	for _, s := range sources(t, ".") {
		// A root test stands in for hostile code, or lays out the host for what it tests.
		if underAny(s.room(), rooms) || strings.HasSuffix(s.path, "_root_test.go") {
			continue
		}
		may := allowed
		if strings.HasSuffix(s.path, "_test.go") {
			may = allowedInTests
		}
		imports := s.imports()
		if _, ok := imports["golang.org/x/sys/unix"]; ok {
			t.Errorf("%s imports golang.org/x/sys/unix: %s", s.path, why)
		}
		name, ok := imports["syscall"]
		if !ok {
			continue
		}
		if name == "." {
			t.Errorf("%s imports syscall with a dot, which hides its calls", s.path)
		}
		ast.Inspect(s.tree, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); !ok || x.Name != name {
				return true
			}
			if syscalls[sel.Sel.Name] { // not a number, a type or an error
				entry := s.room() + " " + sel.Sel.Name
				if used[entry] = true; may[entry] == "" {
					t.Errorf("%s uses syscall.%s: %s", s.path, sel.Sel.Name, why)
				}
			}
			return true
		})
	}
	for _, list := range []map[string]string{allowed, allowedInTests} {
		for entry := range list {
			if !used[entry] {
				t.Errorf("%s is allowed and nobody uses it", entry)
			}
		}
	}
}

func TestThreeFilesNameConcreteParts(t *testing.T) {
	three := []string{"cmd/dsec/node.go", "cmd/dsec/control.go", "cmd/dsec/hostcheck.go"}
	for _, s := range sources(t, "cmd/dsec") {
		if slices.Contains(three, filepath.ToSlash(s.path)) || strings.HasSuffix(s.path, "_test.go") {
			continue
		}
		for p := range s.imports() {
			if underAny(p, []string{"dsec/internal/edge", "dsec/internal/control"}) {
				t.Errorf("%s imports %s: %v alone know what the platform is made of", s.path, p, three)
			}
		}
	}
}

// What a user types goes through the client, so that whatever dsec can do, any program can.
func TestCommandLineGoesThroughTheClient(t *testing.T) {
	for _, s := range sources(t, "cmd/dsec") {
		for p := range s.imports() {
			if !strings.HasSuffix(s.path, "_test.go") && (under(p, "dsec/api/dsec/v1/dsecv1connect") || under(p, "connectrpc.com/connect")) {
				t.Errorf("%s imports %s: the user's commands call the platform through dsec/client alone", s.path, p)
			}
		}
	}
}

// The control plane may be moved off the nodes, and its tests run on a laptop.
func TestControlBuildsOnAnyOS(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "go", "vet", "./sandbox/...", "./client/...", "./internal/control/...", "./internal/config/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=darwin")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
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
