package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"dsec/sandbox"
)

// StdinChunk is how much input one request carries at most, in bytes. It is also what is kept to be sent again.
const StdinChunk = 256 << 10

// A Stdin writes a command's input. Each piece carries its offset, so that it may be sent twice and arrives once. One goroutine
// writes. Where others write the same input, see Shared.
type Stdin struct {
	ctx    context.Context // of the writes: an io.Writer has no other way to get one
	k      *Command
	offset int64
	shared bool
}

// Stdin writes the input of a command that was started with stdin_follows or a terminal, from an offset: 0, or what
// CommandResult.StdinSize says of one that has got some.
func (k *Command) Stdin(ctx context.Context, offset int64) *Stdin {
	return &Stdin{ctx: ctx, k: k, offset: offset}
}

// Shared makes it one of several that write the same input, as people do at one terminal: what is written goes behind what
// others have written meanwhile, and nothing is lost.
func (w *Stdin) Shared() *Stdin {
	w.shared = true
	return w
}

// Offset is how much has been written.
func (w *Stdin) Offset() int64 { return w.offset }

// Write returns when the command's input has taken p. RefusesInput says of an error that the command wants none.
func (w *Stdin) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		piece := p[n:min(n+StdinChunk, len(p))]
		if err := w.send(piece, false); err != nil {
			return n, err
		}
		n += len(piece)
	}
	return len(p), nil
}

// Close ends the input.
func (w *Stdin) Close() error { return w.send(nil, true) }

// Finish writes the last piece, of at most StdinChunk bytes, and ends the input, in one request.
func (w *Stdin) Finish(p []byte) error { return w.send(p, true) }

func (w *Stdin) send(p []byte, closing bool) error {
	exact := w.shared // until an attempt may have arrived without its answer: then only its offset tells
	_, err := call(w.ctx, w.k.sb.c, func(ctx context.Context) (struct{}, error) {
		for {
			taken, err := w.sendOnce(ctx, p, closing, exact)
			if at, moved := movedTo(err); moved && exact {
				w.offset = at
				continue
			}
			exact = false
			if err == nil {
				w.offset = max(w.offset+int64(len(p)), taken)
			}
			return struct{}{}, err
		}
	})
	return err
}

func (w *Stdin) sendOnce(ctx context.Context, p []byte, closing, exact bool) (taken int64, err error) {
	q := url.Values{"offset": {strconv.FormatInt(w.offset, 10)}}
	for name, on := range map[string]bool{"close": closing, "exact": exact} {
		if on {
			q.Set(name, "1")
		}
	}
	res, err := w.k.sb.c.request(ctx, http.MethodPut, w.k.path("stdin"), q, bytes.NewReader(p))
	if err != nil {
		return 0, err
	}
	return takenInput(res)
}

// movedTo is where the input is, if err says that it is further than was thought.
func movedTo(err error) (int64, bool) {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != "stdin_moved" {
		return 0, false
	}
	at, perr := strconv.ParseInt(e.Facts["offset"], 10, 64)
	return at, perr == nil
}

// takenInput is how much input a command has been given, by the platform's answer; 0 if it does not say.
func takenInput(res *http.Response) (int64, error) {
	defer res.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxErrorBody))
	var answer struct {
		Offset int64 `json:"offset"`
	}
	if json.Unmarshal(raw, &answer) != nil {
		answer.Offset = 0
	}
	return answer.Offset, err
}
