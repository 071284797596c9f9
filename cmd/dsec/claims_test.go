package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dsec/sandbox"
)

// aPlatform has directories of its own, and a journal as if it had made sandboxes.
func aPlatform(t *testing.T, runDir string) *platform {
	t.Helper()
	p := &platform{dataDir: t.TempDir(), runDir: runDir}
	if err := os.MkdirAll(p.edgeDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.journal(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRunDirHasOneOwner(t *testing.T) {
	a := aPlatform(t, t.TempDir())
	b := aPlatform(t, a.runDir)
	claim, err := a.claimRunDir()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.claimRunDir(); sandbox.ReasonOf(err) != "run_dir_in_use" {
		t.Fatalf("while it is used: %v", err)
	}
	if !a.ownsRunDir() || b.ownsRunDir() {
		t.Fatalf("owned by a: %v, by b: %v", a.ownsRunDir(), b.ownsRunDir())
	}
	claim.Close() // killed: its sandboxes go on
	if _, err := b.claimRunDir(); sandbox.ReasonOf(err) != "run_dir_in_use" {
		t.Fatalf("after its owner was killed: %v", err)
	}
	if claim, err = a.claimRunDir(); err != nil {
		t.Fatalf("again by its owner: %v", err)
	}
	claim.Close()
	if err := os.Remove(a.journal()); err != nil { // nothing is left of it
		t.Fatal(err)
	}
	if claim, err = b.claimRunDir(); err != nil {
		t.Fatalf("after its owner is gone: %v", err)
	}
	defer claim.Close()
	if a.ownsRunDir() || !b.ownsRunDir() {
		t.Fatalf("then owned by a: %v, by b: %v", a.ownsRunDir(), b.ownsRunDir())
	}
}

func TestPlainDirectoryIsNobodys(t *testing.T) {
	p := aPlatform(t, filepath.Join(t.TempDir(), "run"))
	if p.ownsRunDir() {
		t.Fatal("there is none")
	}
	if err := os.Mkdir(p.runDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if p.ownsRunDir() {
		t.Fatal("nothing is mounted there")
	}
}

func TestLockThatWasRemovedIsTakenAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := openLocked(path)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := openLocked(path); !errors.Is(err, errLocked) {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if isStill(first, path) {
		t.Fatal("a removed file counts")
	}
	second, err := openLocked(path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if !isStill(second, path) {
		t.Fatal("the new file does not count")
	}
}

func TestPlatformsHaveOtherIDs(t *testing.T) {
	defer func(old string) { idBlocksDir = old }(idBlocksDir)
	idBlocksDir = filepath.Join(t.TempDir(), "blocks")
	claim := func(runDir string, sandboxes int) *idClaim {
		t.Helper()
		c, err := claimIDs(runDir, sandboxes)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.release)
		return c
	}
	runA, runB, runC := t.TempDir(), t.TempDir(), t.TempDir()
	a := claim(runA, 4000)
	if a.base() != 0x10000000 || a.capacity() != 4096 {
		t.Fatalf("the first: base %#x, %d ranges", a.base(), a.capacity())
	}
	b := claim(runB, 10000)
	if b.base() != 0x20000000 || b.capacity() != 3*4096 {
		t.Fatalf("the second: base %#x, %d ranges", b.base(), b.capacity())
	}
	b.release() // its edge was killed; its sandboxes have these ids still
	c := claim(runC, 1)
	if c.base() != 0x50000000 {
		t.Fatalf("the third: base %#x", c.base())
	}
	if again := claim(runB, 1); again.base() != 0x20000000 || again.capacity() != 3*4096 {
		t.Fatalf("the second again: base %#x, %d ranges", again.base(), again.capacity())
	}
	if _, err := claimIDs(t.TempDir(), 50000); sandbox.ReasonOf(err) != "no_ids" {
		t.Fatalf("more than there are: %v", err)
	}
	a.giveBack()
	c.giveBack()
	if d := claim(t.TempDir(), 1); d.base() != 0x10000000 {
		t.Fatalf("given back: base %#x", d.base())
	}
	if uint64(lastIDBlock+1)*idBlockSize > 1<<32-2 {
		t.Fatal("the last block ends beyond the last id")
	}
}
