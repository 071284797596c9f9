package main

import (
	"context"
	_ "embed"
	"errors"
	"os"
	"path/filepath"
)

//go:embed setup.sh
var setupScript []byte

//go:embed standin.sh
var standinScript []byte

// makePayload makes the disk with what changes from run to run: tests, the programs they need, and what runs them.
func makePayload(ctx context.Context, dir string, tests []test) (string, error) {
	tree := filepath.Join(dir, "payload")
	packages := packagesOf(tests)
	for _, d := range []string{"bin", "programs", "tests"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			return "", err
		}
	}
	for _, p := range packages { // tests run in the directory of their package
		if err := os.MkdirAll(filepath.Join(tree, "src", p), 0o755); err != nil {
			return "", err
		}
	}
	// Where those look for the programs who run them.
	if err := os.Symlink("/lab/programs", filepath.Join(tree, "src/bin")); err != nil {
		return "", err
	}
	say("building the tests of %d packages", len(packages))
	err := errors.Join(
		buildPrograms(ctx, tree), buildTests(ctx, filepath.Join(tree, "tests")+"/", packages),
		os.WriteFile(filepath.Join(tree, "setup.sh"), setupScript, 0o755),
		os.WriteFile(filepath.Join(tree, "bin/go"), standinScript, 0o755),
		os.WriteFile(filepath.Join(tree, "bin/musl-gcc"), standinScript, 0o755),
	)
	if err != nil {
		return "", err
	}
	disk := filepath.Join(dir, "payload.ext4")
	if err := makeDisk(ctx, disk, tree); err != nil {
		return "", err
	}
	return disk, os.RemoveAll(tree)
}

func buildTests(ctx context.Context, out string, packages []string) error {
	args := []string{"test", "-c", "-tags", "rootful", "-ldflags", "-s -w", "-o", out}
	for _, p := range packages {
		args = append(args, "./"+p)
	}
	return goStatic(ctx, args...)
}

// goStatic runs the go tool for programs that need nothing of where they run.
func goStatic(ctx context.Context, args ...string) error {
	_, err := command(ctx, "", "env", append([]string{"CGO_ENABLED=0", "go"}, args...)...)
	return err
}

func buildPrograms(ctx context.Context, tree string) error {
	build := func(out, pkg string) error {
		return goStatic(ctx, "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(tree, out), pkg)
	}
	_, err := command(ctx, "", "musl-gcc", "-static", "-Os", "-std=gnu11", "-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu",
		"-o", filepath.Join(tree, "programs/stage"), "internal/edge/driver/container/stage/stage.c")
	return errors.Join(err, build("agent", "./test/lab/agent"), build("programs/dsec", "./cmd/dsec"), build("programs/aether", "./cmd/aether"))
}
