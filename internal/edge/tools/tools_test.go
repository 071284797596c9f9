package tools

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"dsec/sandbox"
)

func TestFindSaysWhatIsMissing(t *testing.T) {
	empty := t.TempDir()
	_, err := Find(empty)
	if e := sandbox.AsError(err); e.Class != sandbox.Unsupported || e.Reason != "no_trusted_tools" {
		t.Errorf("without a busybox: %v", err)
	}
	script := t.TempDir()
	if err := os.WriteFile(filepath.Join(script, program), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := Find(script); err == nil {
		t.Errorf("a script is taken: %s", path)
	}
}

// The copy has the length of the original, and nothing else is changed.
func TestClosed(t *testing.T) {
	in := []byte("a/etc/nsswitch.conf\x00b-/bin/sh\x00/bin/shell\x00/bin/sh\x00")
	want := []byte("a/dev/-/-" + "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" + "b-/dev/-\x00\x00/bin/shell\x00/dev/-\x00\x00")
	if got := closed(bytes.Clone(in)); !bytes.Equal(got, want) || len(got) != len(in) {
		t.Errorf("%q (%d), want %q (%d)", got, len(got), want, len(in))
	}
}
