package linux

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
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
