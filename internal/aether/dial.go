package aether

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const maxDialTime = time.Minute

// dial connects to a port as a program inside would, and carries bytes until both directions have ended.
func (b *byteStream) dial(r *aetherv1.Dial) (*aetherv1.Done, error) {
	nc, err := connect(b.ctx, r)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	defer context.AfterFunc(b.ctx, func() { _ = nc.Close() })()
	b.accept()
	var in sync.WaitGroup
	in.Go(func() {
		if _, err := b.WriteTo(nc); err != nil {
			_ = b.CloseRead() // the other side's writes fail from now on
			return
		}
		_ = nc.CloseWrite() // fails if it has been reset, which reading tells
	})
	_, err = io.Copy(b, struct{ io.Reader }{nc})
	if err != nil {
		return nil, asFailure("read from the port", err)
	}
	if err := b.CloseWrite(); err != nil {
		return nil, err
	}
	in.Wait()
	return &aetherv1.Done{}, nil
}

func connect(ctx context.Context, r *aetherv1.Dial) (*net.TCPConn, error) {
	if r.Port == 0 || r.Port > 65535 {
		return nil, failf(aetherv1.Code_CODE_INVALID, "port %d is not 1 to 65535", r.Port)
	}
	limit := maxDialTime
	if r.TimeoutMs > 0 {
		limit = min(limit, time.Duration(min(r.TimeoutMs, 1<<30))*time.Millisecond)
	}
	d := net.Dialer{Timeout: limit}
	hosts := []string{r.Host}
	if r.Host == "" {
		hosts = []string{"127.0.0.1", "::1"}
	}
	var first error
	for _, h := range hosts {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(h, strconv.Itoa(int(r.Port))))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	if errors.Is(first, unix.ECONNREFUSED) {
		return nil, failf(aetherv1.Code_CODE_NOT_FOUND, "nothing listens on port %d", r.Port)
	}
	return nil, asFailure("connect to port "+strconv.Itoa(int(r.Port)), first)
}
