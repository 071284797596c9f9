package aether

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

const (
	maxDialTime  = time.Minute
	maxDials     = 1024 // connections at once
	maxHostsFile = 1 << 20
)

// dialWindow is how much the edge may send beyond what the port took, for the n-th connection at once: all that wait for ports
// which do not read must fit into aether's memory.
func dialWindow(n int) uint64 {
	switch {
	case n <= 16:
		return wire.Window
	case n <= 128:
		return 64 << 10
	}
	return 8 << 10
}

// dial connects to a port as a program inside would, and carries bytes until both directions have ended.
func (b *byteStream) dial(r *aetherv1.Dial) (*aetherv1.Done, error) {
	nc, err := connect(b.ctx, r)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	defer context.AfterFunc(b.ctx, func() {
		if b.Broken() || b.s.ended() {
			_ = nc.SetLinger(0) // the server shall see that it was cut, not that it ended
		}
		_ = nc.Close()
	})()
	b.accept()
	var in sync.WaitGroup
	in.Go(func() {
		if _, err := b.WriteTo(nc); err != nil {
			_ = b.CloseRead() // the other side's writes fail from now on
			return
		}
		_ = nc.CloseWrite() // fails if it has been reset, which reading tells
	})
	if err := send(b, nc, int(min(b.window, dialBuffer))); err != nil {
		if b.ctx.Err() != nil {
			return nil, errCanceled
		}
		return nil, asFailure("read from the port", err)
	}
	if err := b.CloseWrite(); err != nil {
		return nil, err
	}
	in.Wait()
	return &aetherv1.Done{}, nil
}

const dialBuffer = 32 << 10

// dialBuffers are those of connections with large windows. Others make their own, which are as small as their windows.
var dialBuffers = sync.Pool{New: func() any { b := make([]byte, dialBuffer); return &b }}

func getDialBuffer(size int) *[]byte {
	if size >= dialBuffer {
		return dialBuffers.Get().(*[]byte)
	}
	b := make([]byte, size)
	return &b
}

func putDialBuffer(b *[]byte) {
	if len(*b) == dialBuffer {
		dialBuffers.Put(b)
	}
}

// send copies what the port sends, with a buffer of that size. A connection that is silent holds none: there may be a thousand,
// and nobody need read what they send.
func send(w io.Writer, nc *net.TCPConn, size int) error {
	raw, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var buf *[]byte
		var n int
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			buf = getDialBuffer(size)
			for {
				if n, rerr = unix.Read(int(fd), *buf); rerr != unix.EINTR {
					break
				}
			}
			if rerr != unix.EAGAIN {
				return true
			}
			putDialBuffer(buf)
			buf = nil
			return false
		})
		if err = errors.Join(err, rerr); err == nil && n > 0 {
			_, err = w.Write((*buf)[:n])
		} else if err == nil {
			err = io.EOF
		}
		if buf != nil {
			putDialBuffer(buf)
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

func connect(ctx context.Context, r *aetherv1.Dial) (*net.TCPConn, error) {
	if r.Port == 0 || r.Port > 65535 {
		return nil, failf(aetherv1.Code_CODE_INVALID, "port %d is not 1 to 65535", r.Port)
	}
	addrs, f := lookup(r.Host)
	if f != nil {
		return nil, f
	}
	limit := maxDialTime
	if r.TimeoutMs > 0 {
		limit = min(limit, time.Duration(min(r.TimeoutMs, 1<<30))*time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var d net.Dialer
	var first error
	for _, a := range addrs {
		c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(a, uint16(r.Port)).String())
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	if ctx.Err() != nil && !errors.Is(first, unix.ECONNREFUSED) {
		return nil, &failure{code: aetherv1.Code_CODE_IO, message: "port " + strconv.Itoa(int(r.Port)) + " did not answer in time", errno: unix.ETIMEDOUT}
	}
	if errors.Is(first, unix.ECONNREFUSED) {
		return nil, &failure{code: aetherv1.Code_CODE_NOT_FOUND, message: "nothing listens on port " + strconv.Itoa(int(r.Port)), errno: unix.ECONNREFUSED}
	}
	return nil, asFailure("connect to port "+strconv.Itoa(int(r.Port)), first)
}

var loopback = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// lookup finds a host's addresses: itself if it is one, the loopback, or what /etc/hosts says. A sandbox has no name servers.
func lookup(host string) ([]netip.Addr, *failure) {
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	if name == "" || name == "localhost" {
		return loopback, nil
	}
	if a, err := netip.ParseAddr(name); err == nil && a.Zone() == "" {
		return []netip.Addr{a}, nil
	}
	f, err := openHosts("/etc/hosts")
	if err == nil {
		defer f.Close()
		if found := inHosts(f, name); len(found) > 0 {
			return found, nil
		}
	}
	return nil, failf(aetherv1.Code_CODE_NOT_FOUND, "no address of host %q is known in the sandbox", clip(host, 256))
}

// openHosts opens a file that the sandbox may have replaced by anything.
func openHosts(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		return nil, errors.Join(unix.EINVAL, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// inHosts finds a name, in lower case, in a hosts file; what does not parse is passed over.
func inHosts(r io.Reader, name string) (found []netip.Addr) {
	const most = 16
	in := bufio.NewScanner(io.LimitReader(r, maxHostsFile))
	for in.Scan() && len(found) < most {
		line, _, _ := strings.Cut(in.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		a, err := netip.ParseAddr(fields[0])
		if err != nil || a.Zone() != "" {
			continue
		}
		for _, f := range fields[1:] {
			if strings.EqualFold(f, name) {
				found = append(found, a)
				break
			}
		}
	}
	return found
}
