package edge

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"dsec/sandbox"
)

const maxPathBytes = 4096 // with the NUL at its end

func pathOf(r *http.Request) (string, error) {
	path := r.URL.Query().Get("path")
	return filePath(path, nil)
}

// A span is a part of a file. length < 0 is to the end; last > 0 is the last bytes, whatever the size.
type span struct {
	offset, length, last int64
	ranged               bool // asked for by Range: answered with 206
}

// getFile sends a file or a part of it: by offset and length, or by Range.
func (e *Edge) getFile(w http.ResponseWriter, r *http.Request, in *instance) error {
	g, err := in.live()
	if err != nil {
		return err
	}
	path, err := pathOf(r)
	if err != nil {
		return err
	}
	sp, err := spanOf(r)
	if err != nil {
		return err
	}
	f := FileRead{Path: path, User: in.userOf(r.URL.Query().Get("user"))}
	info, body, err := openSpan(r.Context(), g, f, &sp)
	if err != nil {
		return err
	}
	defer body.Close()
	if sp.ranged && sp.offset >= info.Size {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", info.Size))
		se := sandbox.Errorf(sandbox.InvalidArgument, "range_not_satisfiable", "the file has %d bytes; the range begins at %d", info.Size, sp.offset)
		w.Header().Set("Dsec-Size", strconv.FormatInt(info.Size, 10))
		writeErrorStatus(w, http.StatusRequestedRangeNotSatisfiable, about(in.id, se))
		return nil
	}
	n := max(min(info.Length, info.Size-sp.offset), 0)
	if sp.length >= 0 {
		n = min(n, sp.length)
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.FormatInt(n, 10))
	h.Set("Accept-Ranges", "bytes")
	h.Set("Dsec-Size", strconv.FormatInt(info.Size, 10))
	h.Set("Dsec-Mode", fmt.Sprintf("%04o", info.Mode&0o7777))
	h.Set("Dsec-Mtime", info.MTime.UTC().Format(time.RFC3339Nano))
	h.Set("Dsec-Uid", strconv.FormatUint(uint64(info.UID), 10))
	h.Set("Dsec-Gid", strconv.FormatUint(uint64(info.GID), 10))
	status := http.StatusOK
	if sp.ranged {
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", sp.offset, sp.offset+n-1, info.Size))
		status = http.StatusPartialContent
	}
	w.WriteHeader(status)
	if r.Method == http.MethodHead || n == 0 {
		return nil
	}
	return sendExactly(&steady{rc: http.NewResponseController(w), w: w}, body, n)
}

// sendExactly copies n bytes. A file that ends before cuts the connection: the peer was promised n.
func sendExactly(w io.Writer, body io.Reader, n int64) error {
	lr := &io.LimitedReader{R: body, N: n}
	if err := copyBody(w, lr); err != nil {
		return err
	}
	if lr.N > 0 {
		return errStarted{io.ErrUnexpectedEOF}
	}
	return nil
}

// openSpan opens the part. For the last bytes of a file its size is asked first.
func openSpan(ctx context.Context, g Guest, f FileRead, sp *span) (FileInfo, io.ReadCloser, error) {
	if sp.last > 0 {
		f.Length = 1
		info, body, err := g.ReadFile(ctx, f)
		if err != nil {
			return info, nil, err
		}
		_ = body.Close()
		sp.offset = max(info.Size-sp.last, 0)
		f.Length = 0
	}
	f.Offset = sp.offset
	switch {
	case sp.length > 0:
		f.Length = sp.length
	case sp.length == 0:
		f.Length = 1 // aether reads 0 as "to the end"; none of it is sent
	}
	return g.ReadFile(ctx, f)
}

func spanOf(r *http.Request) (span, error) {
	if v := r.Header.Get("Range"); v != "" {
		if sp, ok := parseRange(v); ok {
			return sp, nil
		}
	}
	offset, err := queryInt(r, "offset", 0)
	if err != nil {
		return span{}, err
	}
	length, err := queryInt(r, "length", -1)
	return span{offset: offset, length: length}, err
}

// parseRange reads one byte range. What it does not understand, also several ranges, is as if it were not there: that is
// what RFC 9110 asks for.
func parseRange(v string) (span, bool) {
	spec, ok := strings.CutPrefix(v, "bytes=")
	first, last, dash := strings.Cut(spec, "-")
	if !ok || !dash || len(v) > 100 {
		return span{}, false
	}
	number := func(s string) (int64, bool) {
		n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 62)
		return int64(n), err == nil
	}
	if strings.TrimSpace(first) == "" {
		n, ok := number(last)
		return span{last: n, length: -1, ranged: true}, ok && n > 0
	}
	from, ok := number(first)
	if !ok {
		return span{}, false
	}
	if strings.TrimSpace(last) == "" {
		return span{offset: from, length: -1, ranged: true}, true
	}
	to, ok := number(last)
	if !ok || to < from {
		return span{}, false
	}
	return span{offset: from, length: to - from + 1, ranged: true}, true
}
