package layers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/internal/rootfs"
	"dsec/sandbox"
)

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return "sha256:" + hex.EncodeToString(sum[:])
}

func TestKeyDependsOnEveryDigestAndTheirOrder(t *testing.T) {
	a, b, c := rootfs.File{Digest: digest("a")}, rootfs.File{Digest: digest("b")}, rootfs.File{Digest: digest("c")}
	keys := make(map[string]bool)
	for _, s := range []rootfs.Source{
		{Metadata: a}, {Metadata: b}, {Metadata: a, Data: []rootfs.File{b}}, {Metadata: a, Data: []rootfs.File{c}},
		{Metadata: a, Data: []rootfs.File{b, c}}, {Metadata: a, Data: []rootfs.File{c, b}},
	} {
		key := keyOf(s)
		if !isKey(key) || keys[key] {
			t.Errorf("key %s of %+v is malformed or not its own", key, s)
		}
		keys[key] = true
	}
	moved := rootfs.Source{Metadata: rootfs.File{Digest: a.Digest, Path: "/elsewhere"}}
	if keyOf(moved) != keyOf(rootfs.Source{Metadata: a}) {
		t.Error("the same content at another path is another layer")
	}
}

func TestIsKey(t *testing.T) {
	good := strings.Repeat("0af9", 16)
	if !isKey(good) {
		t.Errorf("%s is refused", good)
	}
	for _, s := range []string{"", good[1:], good + "0", strings.ToUpper(good), "../" + good[3:], good[:63] + "/"} {
		if isKey(s) {
			t.Errorf("%q is taken", s)
		}
	}
}

func TestOpenFileAndDigest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := rootfs.File{Path: path, Digest: digest("content"), Size: 7}
	f, err := openFile(want)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := checkDigest(t.Context(), f, want); err != nil {
		t.Errorf("the right digest: %v", err)
	}
	want.Digest = digest("other")
	if err := checkDigest(t.Context(), f, want); sandbox.ReasonOf(err) != "layer_corrupt" {
		t.Errorf("a wrong digest: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := checkDigest(ctx, f, want); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled check: %v", err)
	}
	want.Size = 8
	if _, err := openFile(want); sandbox.ReasonOf(err) != "layer_corrupt" {
		t.Errorf("a wrong size: %v", err)
	}
	want.Path += "x"
	if _, err := openFile(want); sandbox.ReasonOf(err) != "layer_missing" || sandbox.ClassOf(err) != sandbox.NotFound {
		t.Errorf("a missing file: %v", err)
	}
}

func FuzzValidate(f *testing.F) {
	f.Add(digest("a"), int64(5))
	f.Add("sha256:../../x", int64(-1))
	f.Fuzz(func(t *testing.T, d string, size int64) {
		err := validate(rootfs.Source{Metadata: rootfs.File{Digest: d, Size: size}})
		if err == nil && (size < 0 || len(d) != 71 || strings.ContainsAny(d, "/.")) {
			t.Errorf("%q of %d bytes is taken", d, size)
		}
	})
}
