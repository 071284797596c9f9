package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"dsec/sandbox"
)

// stdinChunk is how much input one request carries at most, in bytes. It is also what is kept to be sent again.
const stdinChunk = 256 << 10

// A piece is what one read of our standard input gave.
type piece struct {
	data []byte
	err  error // io.EOF at the end
}

// feed passes our standard input to the command until it ends, in pieces that carry their offset, so that a piece may be
// sent twice. A command that does not want its input ends the feed, not the attachment.
//
// The goroutine that reads our standard input is not waited for: a read of a terminal cannot be interrupted.
func (a *attachment) feed(ctx context.Context, ended <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() { // ends the request that waits for a command which has ended
		select {
		case <-ended:
			cancel()
		case <-stop:
		}
	}()
	pieces := make(chan piece)
	go readPieces(ctx, a.stdin, pieces)
	var offset int64
	for {
		select {
		case <-ctx.Done():
			return nil // whoever ended it says why
		case p := <-pieces:
			closing := p.err != nil
			if closing && !errors.Is(p.err, io.EOF) {
				// Before it is closed: a command that ends at once cancels us, and nobody would hear of it.
				a.say("reading standard input: %s; the command sees its end here", p.err)
			}
			err := a.sendStdin(ctx, offset, p.data, closing)
			offset += int64(len(p.data))
			switch {
			case ctx.Err() != nil || refusesInput(err):
				return nil
			case err != nil:
				return err
			case closing:
				return nil
			}
		}
	}
}

// readPieces reads r to its end or until ctx ends.
func readPieces(ctx context.Context, r io.Reader, to chan<- piece) {
	for {
		buf := make([]byte, stdinChunk)
		n, err := r.Read(buf)
		if n == 0 && err == nil {
			continue
		}
		select {
		case to <- piece{buf[:n], err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// sendStdin sends one piece, again while the platform is away.
func (a *attachment) sendStdin(ctx context.Context, offset int64, data []byte, closing bool) error {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if closing {
		q.Set("close", "1")
	}
	_, err := call(ctx, a.cl, func(ctx context.Context) (struct{}, error) {
		res, err := a.cl.request(ctx, http.MethodPut, commandPath(a.sandboxID, a.commandID, "stdin"), q, bytes.NewReader(data), nil)
		if err != nil {
			return struct{}{}, err
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, io.LimitReader(res.Body, maxErrorBody))
		return struct{}{}, err
	})
	return err
}

// refusesInput reports whether the command has ended or closed its input: its result says so. Anything else that is refused,
// like a gap in the input, would be lost in silence.
func refusesInput(err error) bool {
	switch sandbox.ReasonOf(err) {
	case "stdin_broken", "stdin_closed", "sandbox_ended", "sandbox_not_found":
		return true
	}
	return false
}
