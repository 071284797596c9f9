package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
)

// request makes one request without a long body on a byte route; see send.
func (c *Client) request(ctx context.Context, method, path string, query url.Values, body io.Reader) (*http.Response, error) {
	target := c.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	return c.do(r)
}

// send is request with a body of size bytes, or of unknown length if size is negative. The platform is asked whether it
// wants the body before it is sent. A failure to read the body is returned as it is.
func (c *Client) send(ctx context.Context, method, path string, query url.Values, body *source, size int64, header http.Header) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.base+path+"?"+query.Encode(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	for k, v := range header {
		r.Header[k] = v
	}
	if size != 0 {
		r.Body, r.ContentLength = body, size
		r.Header.Set("Expect", "100-continue")
	}
	// The HTTP client closes the body of a cancelled request too, but now and then only after it has waited for the read.
	stop := context.AfterFunc(ctx, func() { body.Close() })
	defer stop()
	res, err := c.do(r)
	if failed := body.failure(); failed != nil {
		if err == nil {
			res.Body.Close()
		}
		return nil, failed
	}
	return res, err
}

// do makes the request. The caller closes the body. An answer that is no 2xx is an error.
func (c *Client) do(r *http.Request) (*http.Response, error) {
	res, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if res.StatusCode < 200 || res.StatusCode > 299 {
		return nil, c.responseError(res)
	}
	c.answered.Store(true)
	return res, nil
}

// drain reads the short answer of an upload, so that its connection serves again.
func drain(res *http.Response) error {
	defer res.Body.Close()
	_, err := io.Copy(io.Discard, io.LimitReader(res.Body, maxErrorBody))
	return err
}

// A source is a request's body that counts and remembers its own failure, which the HTTP client would blame on the network.
type source struct {
	r      io.Reader
	report func(total int64) // progress, may be nil
	n      atomic.Int64
	closed atomic.Bool

	mu  sync.Mutex
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	total := s.n.Add(int64(n))
	if s.report != nil && n > 0 {
		s.report(total)
	}
	if err != nil && !errors.Is(err, io.EOF) && !s.closed.Load() { // else it is our own doing
		s.mu.Lock()
		s.err = &ReadError{err}
		s.mu.Unlock()
	}
	return n, err
}

// ErrNotWanted is what a pipe's writer gets that feeds a body which has ended.
var ErrNotWanted = errors.New("the platform takes no more input")

// Close ends a read that waits; a cancelled request does not return before it.
func (s *source) Close() error {
	s.closed.Store(true)
	if p, ok := s.r.(*io.PipeReader); ok {
		return p.CloseWithError(ErrNotWanted)
	}
	return nil // a file, which never waits and is its opener's
}

func (s *source) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Piped makes a reader of one whose reads cannot be interrupted, such as a terminal: a cancelled upload need not wait for
// it. Its goroutine ends with the process or the input.
func Piped(from io.Reader) io.Reader {
	r, w := io.Pipe()
	go func() {
		_, err := io.Copy(w, from)
		w.CloseWithError(err)
	}()
	return r
}

func sandboxPath(id string) string { return "/v1/sandboxes/" + url.PathEscape(id) }
