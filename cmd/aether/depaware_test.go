package main

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestDepaware fails when aether links other packages than depaware.txt says. After a look at why, write it anew:
//
//	UPDATE_DEPAWARE=1 go test ./cmd/aether
func TestDepaware(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var linked []string
	for p := range strings.FieldsSeq(string(out)) {
		first, _, _ := strings.Cut(p, "/")
		if p != "dsec/cmd/aether" && first != "internal" && first != "vendor" && !strings.Contains(p, "/internal/fips140") {
			linked = append(linked, p)
		}
	}
	slices.Sort(linked)
	got := strings.Join(linked, "\n") + "\n"
	if os.Getenv("UPDATE_DEPAWARE") != "" {
		if err := os.WriteFile("depaware.txt", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("depaware.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	listed := strings.Fields(string(want))
	for _, p := range linked {
		if !slices.Contains(listed, p) {
			t.Errorf("newly linked: %s", p)
		}
	}
	for _, p := range listed {
		if !slices.Contains(linked, p) {
			t.Errorf("no longer linked: %s", p)
		}
	}
	for _, bad := range []string{"net/http", "google.golang.org/grpc", "os/exec", "database/sql"} {
		if slices.Contains(linked, bad) {
			t.Errorf("%s does not belong into aether", bad)
		}
	}
}
