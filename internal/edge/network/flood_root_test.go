//go:build rootful

package network

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// halfOpen begins n connections from inside a slot and never hears the answers: a filter that any program can put on its own
// socket drops them.
func halfOpen(t *testing.T, ns string, to [4]byte, port, n int) {
	t.Helper()
	var fds []int
	t.Cleanup(func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	})
	deaf := unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}}
	inside(t, ns, func() error {
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &deaf); err != nil {
				return err
			}
			if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to, Port: port}); !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		}
		return nil
	})
}

func TestHalfOpenConnectionsOfOneHoldUpNobody(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	p := Policy{Open: []Destination{x.dest(8080, TCP)}}
	hostile, hostileNS := acquireOpen(t, s, p)
	quiet, quietNS := acquireOpen(t, s, p)
	for range 3 {
		halfOpen(t, hostileNS, x.addr.As4(), 8080, 3000)
		for range 20 {
			began := time.Now()
			c, err := dial(quietNS, "tcp", fmt.Sprintf("%s:8080", x.addr))
			if err != nil {
				t.Fatalf("beside half-open connections of another sandbox: %v after %v", err, time.Since(began))
			}
			wantEcho(t, c, "a neighbour's")
			c.Close()
		}
	}
	release(t, s, quiet)
	release(t, s, hostile)
}
