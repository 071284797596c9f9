//go:build rootful

package container

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/internal/aether/config"
)

// TestMain makes this program four: the tests, the PID 1 of their sandboxes, the commands inside, and an edge that is killed.
func TestMain(m *testing.M) {
	switch os.Args[0] {
	case "aether":
		guestMain()
	case "edge":
		edgeMain()
	case "command":
		fmt.Print(runProbe(os.Args[1]))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// guestMain protects itself as aether does, and serves probes.
func guestMain() {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		panic(err)
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0); errno != 0 {
		panic(errno)
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		panic(err)
	}
	guestConfig, guestConfigErr = config.Decode(os.NewFile(4, "config"))
	for {
		conn, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go serve(conn)
	}
}

var (
	guestConfig    config.Config
	guestConfigErr error
)

func serve(conn net.Conn) {
	defer conn.Close()
	var r request
	if err := json.NewDecoder(conn).Decode(&r); err != nil {
		return
	}
	answer := ""
	switch {
	case r.Probe == "exit":
		os.Exit(7)
	case r.Probe == "panic":
		fmt.Fprintln(os.Stderr, "last words")
		os.Exit(2)
	case r.Command:
		answer = runCommand(r)
	default:
		answer = runProbe(r.Probe)
	}
	_ = json.NewEncoder(conn).Encode(answer)
}

func runCommand(r request) string {
	cmd := exec.Command("/opt/probe")
	cmd.Args = []string{"command", r.Probe}
	if sh, ok := strings.CutPrefix(r.Probe, "sh:"); ok {
		cmd = exec.Command("/bin/sh", "-c", sh)
	}
	cmd.Env = []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if r.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(r.UID), Gid: uint32(r.UID)}
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) || out.Len() == 0 {
			fmt.Fprintf(&out, "%v", err)
		}
	}
	return out.String()
}

// runProbe tries one thing and says what came of it: "ok", or the error's name.
func runProbe(name string) string {
	probe, ok := probes[name]
	if !ok {
		return "no such probe"
	}
	return outcome(probe())
}

func outcome(err error) string {
	var errno unix.Errno
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	}
	return err.Error()
}

func call(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

func openFor(path string, flags int) func() error {
	return func() error {
		fd, err := unix.Open(path, flags, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
}

// readByte reads one byte: a masked file is there and empty.
func readByte(path string) func() error {
	return func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if n, err := f.Read(make([]byte, 1)); n == 0 {
			if errors.Is(err, io.EOF) {
				return errors.New("empty")
			}
			return err
		}
		return nil
	}
}

func socketOf(domain, kind, protocol int) func() error {
	return func() error {
		fd, err := unix.Socket(domain, kind, protocol)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
}
