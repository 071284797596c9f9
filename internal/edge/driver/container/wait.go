package container

import (
	"context"
	"errors"
	"net"
	"os"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// watch waits for the process in the background: one goroutine and one descriptor per sandbox, no thread.
func (d *Driver) watch(id sandbox.ID, b *box, process *linux.Process) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	b.process = process
	if d.closed { // Detach came between; the record has it
		process.Close()
		b.closeLog()
		return errDetached
	}
	d.boxes[id] = b
	d.watchers.Go(func() {
		exit, err := process.Wait()
		if errors.Is(err, os.ErrClosed) { // detached: the sandbox goes on
			b.closeLog()
			return
		}
		if err != nil {
			d.log.Error("cannot wait for aether", "sandbox_id", id, "error", err)
		}
		process.Close()
		b.exit = driver.Exit(exit)
		d.logLastWords(id, b)
		close(b.done)
	})
	return nil
}

// closeLog gives back what aether's last words would have been read from. The watcher does it, or who finds that there is none.
func (b *box) closeLog() {
	if b.log != nil {
		b.log.Close()
	}
}

// logLastWords logs what aether wrote: normally nothing, else why it died.
func (d *Driver) logLastWords(id sandbox.ID, b *box) {
	if b.log == nil {
		return
	}
	if words := b.log.Close(); len(words) > 0 {
		const most = 4 << 10
		d.log.Error("aether ended with a message", "sandbox_id", id, "message", string(words[:min(len(words), most)]))
	}
}

// Wait implements driver.Driver.
func (d *Driver) Wait(ctx context.Context, h driver.Handle) (driver.Exit, error) {
	if _, err := parseHandle(h); err != nil {
		return driver.Exit{Code: -1}, err
	}
	b := d.box(h.ID)
	if b == nil { // never started, or of an earlier process of the edge
		status, err := d.Recover(ctx, h)
		if err != nil || !status.Running {
			return status.Exit, err
		}
		if b = d.box(h.ID); b == nil {
			return driver.Exit{Code: -1}, nil
		}
	}
	select {
	case <-b.done:
		return b.exit, nil
	case <-ctx.Done():
		return driver.Exit{Code: -1}, ctx.Err()
	}
}

// DialGuest implements driver.Driver.
func (d *Driver) DialGuest(ctx context.Context, h driver.Handle) (net.Conn, error) {
	if _, err := parseHandle(h); err != nil {
		return nil, err
	}
	addr := d.sockets.Addr(string(h.ID))
	conn, err := new(net.Dialer).DialContext(ctx, addr.Net, addr.Name)
	switch {
	case err == nil:
		return conn, nil
	case linux.Refused(err):
		return nil, sandbox.Errorf(sandbox.Unavailable, "guest_unavailable", "the sandbox does not take connections").WithCause(err)
	}
	return nil, err
}
