package edgeclient

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"slices"
	"sync"
	"time"
)

const (
	smallBlock = 4 << 10
	largeBlock = 256 << 10
	// takeIdle is how long a caller may take nothing of an answer: longer than what the edge lets a follower pause.
	takeIdle = 11 * time.Minute
)

// notPassed are the headers of an answer that concern the connection to the edge alone.
var notPassed = []string{"Connection", "Keep-Alive", "Transfer-Encoding", "Trailer", "Upgrade"}

var largeBlocks = sync.Pool{New: func() any { b := make([]byte, largeBlock); return &b }}

// get passes on an answer that may be long, or long in coming: each piece as it comes, in large ones while it is busy, and with
// little memory while it is silent.
func (p *byteProxy) get(w http.ResponseWriter, r *http.Request, c byteCall) {
	out := r.Clone(r.Context())
	out.RequestURI, out.Body, out.ContentLength, out.Close = "", nil, 0, false
	rewrite(&httputil.ProxyRequest{In: r, Out: out})
	res, err := p.transport.RoundTrip(out)
	if err != nil {
		c.onError(w, r, err)
		return
	}
	defer res.Body.Close()
	h := w.Header()
	for name, v := range res.Header {
		if !slices.Contains(notPassed, name) {
			h[name] = v
		}
	}
	for name := range res.Trailer {
		h.Add("Trailer", name)
	}
	w.WriteHeader(res.StatusCode)
	if err := copyAsItComes(w, res.Body, res.ContentLength < 0); err != nil {
		panic(http.ErrAbortHandler) // or the caller would take it for the whole
	}
	maps.Copy(h, res.Trailer)
}

// copyAsItComes copies until src's end. With flush nothing waits for more.
func copyAsItComes(w http.ResponseWriter, src io.Reader, flush bool) error {
	rc := http.NewResponseController(w)
	var small [smallBlock]byte
	var large *[]byte
	defer func() {
		if large != nil {
			largeBlocks.Put(large)
		}
	}()
	passOn := func() error {
		if !flush {
			return nil
		}
		return rc.Flush()
	}
	if err := passOn(); err != nil { // the head
		return err
	}
	for {
		b := small[:]
		if large != nil {
			b = *large
		}
		n, err := src.Read(b)
		if n > 0 {
			_ = rc.SetWriteDeadline(time.Now().Add(takeIdle)) // fails on a connection that is gone, as the write will
			if _, werr := w.Write(b[:n]); werr != nil {
				return werr
			}
			if werr := passOn(); werr != nil { // the next read may wait
				return werr
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return rc.SetWriteDeadline(time.Time{})
		case err != nil:
			return err
		case large == nil && n == len(b):
			large = largeBlocks.Get().(*[]byte)
		case large != nil && n < len(b)/16:
			largeBlocks.Put(large)
			large = nil
		}
	}
}
