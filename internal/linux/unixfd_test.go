package linux

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A run directory deeper than a socket's path may be long.
func TestSocketInADeepDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 40))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := OpenSocketDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	const name = "saaaaabbbbbbbbbbbbbbbbccdddddddd"
	fd, err := d.Listen(name, 1)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUnix("unix", nil, d.Addr(name))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	Close(fd)
	if _, err := net.DialUnix("unix", nil, d.Addr(name)); !Refused(err) {
		t.Errorf("dial without a listener: %v", err)
	}
	for range 2 {
		if err := d.Remove(name); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := net.DialUnix("unix", nil, d.Addr(name)); !Refused(err) {
		t.Errorf("dial of nothing: %v", err)
	}
}

// A writer that writes more than is kept goes on.
func TestLogPipe(t *testing.T) {
	l, fd, err := NewLogPipe()
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.Write(fd, bytes.Repeat([]byte("x"), 1<<20))
	if err != nil || n != 64<<10 {
		t.Errorf("wrote %d of a megabyte, %v", n, err)
	}
	if _, err := unix.Write(fd, []byte("more")); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("wrote to a full log: %v", err)
	}
	Close(fd)
	if got := l.Close(); len(got) != 64<<10 {
		t.Errorf("kept %d bytes", len(got))
	}
}

func TestMessageFile(t *testing.T) {
	fd, err := MessageFile([]byte("hello"))
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "message")
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := MessageFile(make([]byte, 64<<10+1)); err == nil {
		t.Error("more than a pipe holds was taken")
	}
}

func TestSocketPairKeepsMessages(t *testing.T) {
	ours, theirs, err := SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	other := os.NewFile(uintptr(theirs), "other")
	for _, m := range []string{"one", "three"} {
		if _, err := other.WriteString(m); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 64)
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "one" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if err := ShutdownWrite(ours); err != nil {
		t.Error(err)
	}
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "three" {
		t.Errorf("after shutdown %q, %v", buf[:n], err)
	}
	if _, err := other.Read(buf); !errors.Is(err, io.EOF) {
		t.Errorf("other end: %v", err)
	}
	other.Close()
	if _, err := ours.Read(buf); !errors.Is(err, io.EOF) {
		t.Errorf("after close: %v", err)
	}
}
