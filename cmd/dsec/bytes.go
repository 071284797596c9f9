package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"

	"dsec/sandbox"
)

// A writeError is a failure of our own output, as opposed to the platform's.
type writeError struct{ err error }

func (e *writeError) Error() string { return "writing the output: " + e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// A readError is a failure to read what is to be sent.
type readError struct{ err error }

func (e *readError) Error() string { return "reading the input: " + e.err.Error() }
func (e *readError) Unwrap() error { return e.err }

// request makes one request without a long body on a byte route; see send.
func (cl *client) request(ctx context.Context, method, path string, query url.Values, body io.Reader, header http.Header) (*http.Response, error) {
	target := cl.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	return cl.do(r, header)
}

// send is request with a body of size bytes, or of unknown length if size is negative. The platform is asked whether it
// wants the body before it is sent. A failure to read the body is returned as it is.
func (cl *client) send(ctx context.Context, method, path string, query url.Values, body *source, size int64, header http.Header) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, cl.base+path+"?"+query.Encode(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	if size != 0 {
		r.Body, r.ContentLength = body, size
		r.Header.Set("Expect", "100-continue")
	}
	// The HTTP client closes the body of a cancelled request too, but now and then only after it has waited for the read.
	stop := context.AfterFunc(ctx, func() { body.Close() })
	defer stop()
	res, err := cl.do(r, header)
	if failed := body.failure(); failed != nil {
		if err == nil {
			res.Body.Close()
		}
		return nil, failed
	}
	return res, err
}

// do makes the request. The caller closes the body. An answer that is no 2xx is an error.
func (cl *client) do(r *http.Request, header http.Header) (*http.Response, error) {
	for k, v := range header {
		r.Header[k] = v
	}
	res, err := cl.http.Do(r)
	if err != nil {
		return nil, err
	}
	if res.StatusCode < 200 || res.StatusCode > 299 {
		return nil, cl.responseError(res)
	}
	cl.answered.Store(true)
	return res, nil
}

// A source is a request's body that counts and remembers its own failure, which the HTTP client would blame on the network.
type source struct {
	r      io.Reader
	report func(total int64) // progress, may be nil
	n      atomic.Int64

	mu  sync.Mutex
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	total := s.n.Add(int64(n))
	if s.report != nil && n > 0 {
		s.report(total)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.mu.Lock()
		s.err = &readError{err}
		s.mu.Unlock()
	}
	return n, err
}

// errNotWanted is what writes into a request's body when the request has ended.
var errNotWanted = errors.New("the platform takes no more input")

// Close ends a read that waits; a cancelled request does not return before it.
func (s *source) Close() error {
	if p, ok := s.r.(*io.PipeReader); ok {
		return p.CloseWithError(errNotWanted)
	}
	return nil // a file, which never waits and is its opener's
}

// piped makes a reader that can be closed of one whose reads cannot be interrupted, such as our standard input. Its goroutine
// ends with the process or the input.
func piped(from io.Reader) *io.PipeReader {
	r, w := io.Pipe()
	go func() {
		_, err := io.Copy(w, from)
		w.CloseWithError(err)
	}()
	return r
}

func (s *source) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func commandPath(sandboxID, commandID, what string) string {
	return "/v1/sandboxes/" + url.PathEscape(sandboxID) + "/commands/" + url.PathEscape(commandID) + "/" + what
}

func filesPath(sandboxID string) string {
	return "/v1/sandboxes/" + url.PathEscape(sandboxID) + "/files"
}

// An outputStream copies one stream of a command, byte for byte, and survives lost connections: it asks again for what
// comes after the last byte that it wrote.
type outputStream struct {
	sandboxID, commandID string
	name                 string // "stdout" or "stderr"
	offset               int64  // the next byte that is wanted
	to                   io.Writer
}

// copy writes what there is, with follow also what comes, until the command ends. Where the platform has dropped the
// middle of a long output it returns the sandbox.Error of reason "output_dropped".
//
// An answer that follows has begun before the platform knows of a gap, and can only be cut. So after one that gave nothing,
// what is kept is asked for without following: that answer can be an error.
func (s *outputStream) copy(ctx context.Context, cl *client, follow bool) error {
	var o outage
	probe := false
	for {
		n, err := s.copyOnce(ctx, cl, follow && !probe)
		if n > 0 {
			o.over()
		}
		var failed *writeError
		switch {
		case err == nil && probe:
			probe = false
			continue
		case err == nil || errors.As(err, &failed):
			return err
		}
		probe = follow && n == 0 && !probe
		if err := cl.wait(ctx, &o, err); err != nil {
			return err
		}
	}
}

func (s *outputStream) copyOnce(ctx context.Context, cl *client, follow bool) (int64, error) {
	q := url.Values{"offset": {strconv.FormatInt(s.offset, 10)}}
	if follow {
		q.Set("follow", "1")
	}
	res, err := cl.request(ctx, http.MethodGet, commandPath(s.sandboxID, s.commandID, s.name), q, nil, nil)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	n, err := copyBytes(s.to, res.Body)
	s.offset += n
	return n, err
}

// copyBytes is io.Copy that tells a failing destination (*writeError) from a failing source.
func copyBytes(to io.Writer, from io.Reader) (int64, error) {
	var total int64
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			w, werr := to.Write(buf[:n])
			total += int64(w)
			if werr != nil {
				return total, &writeError{werr}
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return total, nil
		case err != nil:
			return total, err
		}
	}
}

// droppedUntil says that the bytes at an offset are gone for good, and where those begin that are kept (0 = unknown).
func droppedUntil(err error) (next int64, dropped bool) {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != "output_dropped" {
		return 0, false
	}
	next, perr := strconv.ParseInt(e.Facts["next_offset"], 10, 64)
	if perr != nil {
		next = 0
	}
	return next, true
}
