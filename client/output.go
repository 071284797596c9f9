package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"dsec/sandbox"
)

// The streams of a command. One with a terminal has Stdout alone.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

const (
	// quietEnd is after how much silence an answer that follows ends, to be asked for again: a connection that has died in
	// silence, too, is noticed.
	quietEnd = 30 * time.Second
	// silentEnd is after how much silence such a connection is given up.
	silentEnd = 3 * quietEnd

	// finalHeader says that the stream ends with this answer, in its head or its trailer.
	finalHeader = "Dsec-Final"
	// offsetHeader is where an answer begins.
	offsetHeader = "Dsec-Offset"
)

// OutputOptions say what of a stream is wanted. Of Offset, Tail, TailLines and Since one may be given; else all is wanted that
// is kept.
type OutputOptions struct {
	Offset    int64     // the first byte that is wanted
	Tail      int64     // so many of the last bytes; less than 0 = none
	TailLines int64     // so many of the last lines; less than 0 = none
	Since     time.Time // what was written at that time or later

	// Follow goes on until the command has ended, and only then is the end of the stream; else it is at the end of what there is.
	Follow bool
	// Gap is told how many bytes are missing where the platform has dropped the middle of a long output, before what comes after them.
	// nil = the gap is an error of reason "output_dropped".
	Gap func(missing int64)
}

// An Output is one stream of a command, byte for byte. It survives lost connections: it asks again for what comes after the
// last byte that it gave. It is read by one goroutine; Close may be called by any.
type Output struct {
	ctx    context.Context // of the reads: an io.Reader has no other way to get one
	cancel context.CancelFunc
	k      *Command
	stream string
	o      OutputOptions // Offset is the next byte that is wanted
	res    *http.Response
	drop   context.CancelFunc // of the answer
	guard  *time.Timer        // drops it after a silence
	outage outage
	opened time.Time
	got    bool  // something, from the answer that is being read
	probe  bool  // this answer does not follow, see failed
	size   int64 // of the whole stream, once the command has ended; -1 = not known
	err    error
}

// Output reads a stream of the command. The caller closes it. Nothing is asked of the platform before the first Read.
func (k *Command) Output(ctx context.Context, stream string, o OutputOptions) *Output {
	ctx, cancel := context.WithCancel(ctx)
	return &Output{ctx: ctx, cancel: cancel, k: k, stream: stream, o: o, size: -1}
}

// Offset is that of the next byte: where another Output goes on.
func (r *Output) Offset() int64 { return r.o.Offset }

// Close ends a read that waits.
func (r *Output) Close() error {
	r.cancel()
	return nil
}

// Read implements io.Reader.
func (r *Output) Read(p []byte) (int, error) {
	for r.err == nil {
		if r.res == nil {
			r.open()
			continue
		}
		if r.guard != nil {
			r.guard.Reset(silentEnd)
		}
		n, err := r.res.Body.Read(p)
		if r.guard != nil {
			r.guard.Stop() // the consumer may take its time
		}
		r.o.Offset += int64(n)
		if n > 0 {
			r.outage.over()
			r.got = true
		}
		if err != nil {
			res := r.res
			r.leave()
			if errors.Is(err, io.EOF) {
				r.finished(res)
			} else {
				r.failed(err)
			}
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// WriteTo implements io.WriterTo. A failure of w is a *WriteError.
func (r *Output) WriteTo(w io.Writer) (int64, error) { return copyTo(w, r) }

func (r *Output) follows() bool { return r.o.Follow && !r.probe && r.size < 0 }

func (r *Output) query() url.Values {
	q := url.Values{}
	set := func(name string, n int64) { q.Set(name, strconv.FormatInt(n, 10)) }
	switch {
	case r.o.Tail != 0:
		set("tail", max(0, r.o.Tail))
	case r.o.TailLines != 0:
		set("tail_lines", max(0, r.o.TailLines))
	case !r.o.Since.IsZero():
		set("since", max(0, r.o.Since.UnixMilli())) // nothing is older
	default:
		set("offset", r.o.Offset)
	}
	if r.follows() {
		q.Set("follow", "1")
		set("wait", int64(quietEnd.Seconds()))
	}
	return q
}

func (r *Output) open() {
	r.got, r.opened = false, time.Now()
	ctx, drop := context.WithCancel(r.ctx)
	res, err := r.k.sb.c.request(ctx, http.MethodGet, r.k.path(r.stream), r.query(), nil)
	if err != nil {
		drop()
		r.failed(err)
		return
	}
	r.res, r.drop = res, drop
	if r.follows() {
		r.guard = time.AfterFunc(silentEnd, drop)
	}
	if r.o.Tail != 0 || r.o.TailLines != 0 || !r.o.Since.IsZero() { // from here on it is known which bytes these are
		r.o.Tail, r.o.TailLines, r.o.Since = 0, 0, time.Time{}
		if r.o.Offset, err = strconv.ParseInt(res.Header.Get(offsetHeader), 10, 64); err != nil {
			r.leave()
			r.err = sandbox.Errorf(sandbox.Unsupported, "no_offset", "the platform does not say where the output begins; it is of another version than this client")
		}
	}
}

// leave lets go of the answer.
func (r *Output) leave() {
	if r.guard != nil {
		r.guard.Stop()
	}
	r.res.Body.Close()
	r.drop()
	r.res, r.drop, r.guard = nil, nil, nil
}

func (k *Command) path(what string) string {
	return sandboxPath(k.sb.ID) + "/commands/" + url.PathEscape(k.ID) + "/" + what
}

// finished looks whether an answer that ended in order was the end of the stream: one that was silent for long, or that
// something between closed early, looks like one. The platform says which is the last; of one that does not, the sizes tell.
func (r *Output) finished(res *http.Response) {
	_, told := res.Trailer[finalHeader]
	final := res.Header.Get(finalHeader) != "" || res.Trailer.Get(finalHeader) != ""
	switch {
	case r.probe:
		r.probe = false
	case !r.o.Follow, final, r.size >= 0 && r.o.Offset >= r.size:
		r.err = io.EOF
	case told && (r.got || time.Since(r.opened) > quietEnd/2): // it was silent
	case told:
		r.failed(sandbox.Errorf(sandbox.Unavailable, "stream_short", "the platform ends the command's %s again and again before it is complete", r.stream))
	case r.size < 0:
		r.learnSize()
	case !r.got:
		r.err = sandbox.Errorf(sandbox.DataLoss, "output_incomplete",
			"%d of %d bytes of the command's %s could not be had; `dsec logs` may still have them", r.size-r.o.Offset, r.size, r.stream)
	}
}

func (r *Output) learnSize() {
	res, err := r.k.Wait(r.ctx)
	if err != nil {
		r.err = err
		return
	}
	out := res.GetStdout()
	if r.stream == Stderr {
		out = res.GetStderr()
	}
	if r.size = out.GetSize(); r.o.Offset >= r.size {
		r.err = io.EOF
	}
}

// failed waits before another attempt, or makes err the stream's end.
//
// An answer that follows has begun before the platform knows of a gap, and can only be cut. So after one that gave nothing,
// what is kept is asked for without following: that answer can be an error.
func (r *Output) failed(err error) {
	if next, dropped := droppedUntil(err); dropped && r.o.Gap != nil && next > r.o.Offset {
		r.o.Gap(next - r.o.Offset)
		r.o.Offset, r.probe = next, false
		return
	}
	r.probe = r.follows() && !r.got
	r.err = r.k.sb.c.wait(r.ctx, &r.outage, err)
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

// copyTo is io.Copy that tells a failing destination (*WriteError) from a failing source.
func copyTo(to io.Writer, from io.Reader) (int64, error) {
	var total int64
	buf := make([]byte, 256<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			w, werr := to.Write(buf[:n])
			total += int64(w)
			if werr != nil {
				return total, &WriteError{werr}
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
