package edge

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"dsec/sandbox"
)

const (
	// followIdle is how long a follower may take nothing. It holds the command back meanwhile, which is what somebody wants
	// who looks at something else for a while; it is also how long one may that will never take anything again.
	followIdle = 10 * time.Minute
	// maxQuiet is the longest silence after which a following answer ends, if it is asked for.
	maxQuiet = time.Hour
	// outputBlock is how much is read and written at once: each costs a few system calls on every hop.
	outputBlock = 256 << 10
	smallBlock  = 4 << 10
	// finalHeader says that the stream ends with this answer. It stands in the head, if the command has ended by then, or
	// in the trailer. Who sees neither asks again at the offset behind what it got.
	finalHeader  = "Dsec-Final"
	offsetHeader = "Dsec-Offset"
)

// blocks are buffers of output.
var blocks = sync.Pool{New: func() any { b := make([]byte, outputBlock); return &b }}

var outputStreams = map[string]int{"stdout": 1, "stderr": 2}

// getOutput sends what is kept of a stream, and with follow what comes until the command's end, or until it is quiet.
func (e *Edge) getOutput(w http.ResponseWriter, r *http.Request, in *instance) error {
	stream, ok := outputStreams[r.PathValue("stream")]
	if !ok {
		return sandbox.Errorf(sandbox.NotFound, "route_not_found", "a command has stdout and stderr, not %q", clip(r.PathValue("stream")))
	}
	q, err := outputQuery(r)
	if err != nil {
		return err
	}
	c, err := in.command(r.PathValue("cmd"))
	if err != nil {
		return err
	}
	out, err := c.Output(stream, q)
	if err != nil {
		return err
	}
	defer out.Close()
	defer closeWhenGone(r, out)()
	return sendOutput(w, out, q.Follow)
}

func outputQuery(r *http.Request) (q OutputQuery, err error) {
	for name, to := range map[string]*int64{"offset": &q.Offset, "since": &q.Since} {
		if *to, err = queryInt(r, name, 0); err != nil {
			return q, err
		}
	}
	for name, to := range map[string]**int64{"tail": &q.Tail, "tail_lines": &q.TailLines} {
		n, err := queryInt(r, name, -1)
		if err != nil {
			return q, err
		}
		if n >= 0 {
			*to = &n
		}
	}
	if err := queryBools(r, map[string]*bool{"follow": &q.Follow}); err != nil {
		return q, err
	}
	q.Quiet, err = queryQuiet(r)
	if err == nil && q.Quiet > 0 && !q.Follow {
		err = sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", "wait is for follow=1")
	}
	return q, err
}

func queryQuiet(r *http.Request) (time.Duration, error) {
	s := r.URL.Query().Get("wait")
	if s == "" {
		return 0, nil
	}
	seconds, err := strconv.ParseFloat(s, 64)
	if err != nil || !(seconds > 0) {
		return 0, sandbox.Errorf(sandbox.InvalidArgument, "invalid_query", "wait=%q is not a number of seconds", clip(s))
	}
	return max(time.Millisecond, time.Duration(min(seconds, maxQuiet.Seconds())*float64(time.Second))), nil
}

// sendOutput copies what out gives. Output that is not kept any more when the first piece is read can still be answered with an
// error.
func sendOutput(w http.ResponseWriter, out OutputReader, follow bool) error {
	// A silent follower shall not cost a large buffer.
	var small [smallBlock]byte
	buf := small[:]
	var large *[]byte
	defer func() {
		if large != nil {
			blocks.Put(large)
		}
	}()
	n := 0
	if out.Ready() {
		large = blocks.Get().(*[]byte)
		buf = *large
		var err error
		if n, err = out.Read(buf); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set(offsetHeader, strconv.FormatInt(out.Offset(), 10))
	switch {
	case out.Final():
		h.Set(finalHeader, "1")
	case follow:
		h.Set("Trailer", finalHeader)
	}
	rc := http.NewResponseController(w)
	if n == 0 && follow {
		_ = rc.Flush() // the head: a command may be silent for long
	}
	s := steady{rc: rc, w: w}
	if follow {
		s.idle = followIdle
	}
	for {
		if n > 0 {
			if _, err := s.Write(buf[:n]); err != nil {
				return errStarted{err}
			}
		}
		switch ready := out.Ready(); {
		case ready && large == nil:
			large = blocks.Get().(*[]byte)
			buf = *large
		case !ready:
			if err := s.flush(follow); err != nil {
				return errStarted{err}
			}
			if large != nil {
				blocks.Put(large)
				large, buf = nil, small[:]
			}
		}
		var err error
		if n, err = out.Read(buf); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return errStarted{err}
		}
	}
	if follow && h.Get(finalHeader) == "" && out.Final() {
		h.Set(finalHeader, "1") // in the trailer
	}
	return nil
}

// flush passes on what was written, if more may be long in coming.
func (s *steady) flush(follow bool) error {
	if !follow {
		return nil
	}
	return s.rc.Flush()
}

// closeWhenGone ends a read that waits for output when its reader has gone away.
func closeWhenGone(r *http.Request, c io.Closer) (stop func()) {
	unless := context.AfterFunc(r.Context(), func() { _ = c.Close() })
	return func() { unless() }
}
