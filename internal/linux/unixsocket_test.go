package linux

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestUnixSocketWithALongPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("deep/", 40), "socket")
	if _, err := ListenUnix(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("listen in a missing directory: %v", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := DialUnix(t.Context(), path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("dial before there is a socket: %v", err)
	}
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := DialUnix(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name is left: %v", err)
	}
	if err := l.Close(); err == nil {
		t.Error("a second close says nothing")
	}
}
