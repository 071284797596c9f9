package linux

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// SocketPair makes two connected sockets that keep message boundaries. The first is for this process and never blocks a
// thread; the second is a raw descriptor for another one.
func SocketPair() (*os.File, int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("make socket pair: %w", err)
	}
	if err := unix.SetNonblock(pair[0], true); err != nil {
		Close(pair[0], pair[1])
		return nil, -1, fmt.Errorf("make socket non-blocking: %w", err)
	}
	return os.NewFile(uintptr(pair[0]), "socketpair"), pair[1], nil
}

// SendFiles writes b, at least a byte, and with its first byte copies of the descriptors. It may write less than all.
func SendFiles(to *net.UnixConn, b []byte, fds []int) (int, error) {
	n, _, err := to.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	return n, err
}

// MessageFile is a pipe from which data can be read once. Data must fit a pipe's 64 KiB.
func MessageFile(data []byte) (int, error) {
	const capacity = 64 << 10
	if len(data) > capacity {
		return -1, fmt.Errorf("message of %d bytes does not fit a pipe", len(data))
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return -1, fmt.Errorf("make pipe: %w", err)
	}
	defer Close(p[1])
	if _, err := unix.Write(p[1], data); err != nil {
		Close(p[0])
		return -1, fmt.Errorf("write to pipe: %w", err)
	}
	return p[0], nil
}

// A LogPipe keeps the first 64 KiB of what a process writes. The writer never blocks: what does not fit is lost.
type LogPipe struct{ read int }

// NewLogPipe makes one, and the raw descriptor of the writing end.
func NewLogPipe() (*LogPipe, int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, -1, fmt.Errorf("make pipe: %w", err)
	}
	return &LogPipe{read: p[0]}, p[1], nil
}

// Close returns what was written and gives the pipe back.
func (l *LogPipe) Close() []byte {
	buf := make([]byte, 64<<10)
	n, err := unix.Read(l.read, buf)
	Close(l.read)
	if err != nil || n < 0 {
		n = 0
	}
	return buf[:n:n]
}

// A SocketDir holds listening sockets by name. Its own path may be of any length: it is entered by descriptor, since the path of a
// socket may have 107 bytes only.
type SocketDir struct{ dir int }

// OpenSocketDir opens the directory at path.
func OpenSocketDir(path string) (*SocketDir, error) {
	fd, err := retryFD("open "+path, func() (int, error) {
		return unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, err
	}
	return &SocketDir{dir: fd}, nil
}

// Close closes the directory; sockets in it stay.
func (d *SocketDir) Close() { Close(d.dir) }

func (d *SocketDir) path(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(d.dir) + "/" + name
}

// Listen makes the socket name and returns its raw descriptor, listening.
func (d *SocketDir) Listen(name string, backlog int) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("make socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: d.path(name)}); err != nil {
		Close(fd)
		return -1, fmt.Errorf("bind socket %s: %w", name, err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		Close(fd)
		return -1, errors.Join(fmt.Errorf("listen on %s: %w", name, err), d.Remove(name))
	}
	return fd, nil
}

// Addr is the address to dial; it is valid while d is open.
func (d *SocketDir) Addr(name string) *net.UnixAddr {
	return &net.UnixAddr{Name: d.path(name), Net: "unix"}
}

// Remove removes the socket's name. A missing one is no error.
func (d *SocketDir) Remove(name string) error {
	if err := unix.Unlinkat(d.dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove socket %s: %w", name, err)
	}
	return nil
}

// Refused reports whether err says that nobody listens, or that the listener cannot take one more now.
func Refused(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAGAIN)
}

// ShutdownWrite tells the other end of a socket that nothing more comes; the socket can still be read.
func ShutdownWrite(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("shut down socket: %w", err)
	}
	var failure error
	err = raw.Control(func(fd uintptr) { failure = unix.Shutdown(int(fd), unix.SHUT_WR) })
	if err = errors.Join(err, failure); err != nil {
		return fmt.Errorf("shut down socket: %w", err)
	}
	return nil
}
