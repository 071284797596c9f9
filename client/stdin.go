package client

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// StdinChunk is how much input one request carries at most, in bytes. It is also what is kept to be sent again.
const StdinChunk = 256 << 10

// A Stdin writes a command's input. Each piece carries its offset, so that it may be sent twice and arrives once. One goroutine
// writes. Of two that write the same input at once, one may lose a piece to the other, and goes on behind it.
type Stdin struct {
	ctx    context.Context // of the writes: an io.Writer has no other way to get one
	k      *Command
	offset int64
}

// Stdin writes the input of a command that was started with stdin_follows or a terminal, from an offset: 0, or what
// CommandResult.StdinSize says of one that has got some.
func (k *Command) Stdin(ctx context.Context, offset int64) *Stdin { return &Stdin{ctx, k, offset} }

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
	q := url.Values{"offset": {strconv.FormatInt(w.offset, 10)}}
	if closing {
		q.Set("close", "1")
	}
	c := w.k.sb.c
	taken, err := call(w.ctx, c, func(ctx context.Context) (int64, error) {
		res, err := c.request(ctx, http.MethodPut, w.k.path("stdin"), q, bytes.NewReader(p))
		if err != nil {
			return 0, err
		}
		return takenInput(res)
	})
	if err == nil {
		// More is taken where somebody else writes, too: two at one terminal. What comes next goes behind theirs.
		w.offset = max(w.offset+int64(len(p)), taken)
	}
	return err
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
