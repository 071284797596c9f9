package linux

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// ListenUnix listens at path, which may be longer than the address of a socket. Closing the listener removes the name.
func ListenUnix(path string) (net.Listener, error) {
	dir, err := OpenSocketDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", dir.Addr(filepath.Base(path)))
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	return &dirListener{Listener: l, dir: dir}, nil
}

// A dirListener keeps the directory open by which the listener's name can be removed.
type dirListener struct {
	net.Listener
	dir  *SocketDir
	once sync.Once
}

func (l *dirListener) Close() error {
	err := l.Listener.Close()
	l.once.Do(l.dir.Close)
	return err
}

// DialUnix connects to the socket at path, which may be longer than the address of a socket.
func DialUnix(ctx context.Context, path string) (net.Conn, error) {
	dir, err := OpenSocketDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", dir.Addr(filepath.Base(path)).Name)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return conn, nil
}

// ListenerPID is the process that listens at the other end of a connection that DialUnix made. The kernel says so, not that process.
func ListenerPID(conn net.Conn) (int, error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return 0, fmt.Errorf("ask who listens: %w", err)
	}
	return int(cred.Pid), nil
}
