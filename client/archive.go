package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"dsec/sandbox"
)

// An ArchiveResult is what an archive holds, or what was unpacked of one.
type ArchiveResult struct {
	Entries    int64 `json:"entries"`
	Bytes      int64 `json:"bytes"`
	Skipped    int64 `json:"skipped"`     // devices, sockets, and what is below the mounts of /proc and the like
	Changed    int64 `json:"changed"`     // files that changed while they were read
	SplitLinks int64 `json:"split_links"` // names of one file that became files of their own
}

// An ArchiveReader is a tree of a sandbox as a tar archive, while it is read. It is of one walk and cannot be resumed: a lost
// connection is an error of Read, and so is what could not be read inside.
type ArchiveReader struct {
	ctx context.Context // of the reads: an io.Reader has no other way to get one
	c   *Client
	res *http.Response
}

// ReadArchive packs a file, or a directory and all below it; with content, the entries of a directory without itself. The
// caller closes it.
func (f *Files) ReadArchive(ctx context.Context, path string, content bool) (*ArchiveReader, error) {
	q := f.query(path)
	if content {
		q.Set("content", "1")
	}
	return f.readArchive(ctx, http.MethodGet, q, "")
}

// ReadArchiveOf packs many regular files in one request, in the order of their paths (absolute), of which there are at most
// 50,000 of 2 MiB together. The caller closes it. One that cannot be read fails the last Read, which says how many others
// could not.
func (f *Files) ReadArchiveOf(ctx context.Context, paths ...string) (*ArchiveReader, error) {
	q := f.query("")
	q.Del("path")
	return f.readArchive(ctx, http.MethodPost, q, strings.Join(paths, "\x00")+"\x00")
}

func (f *Files) readArchive(ctx context.Context, method string, q url.Values, names string) (*ArchiveReader, error) {
	c := f.sb.c
	res, err := call(ctx, c, func(ctx context.Context) (*http.Response, error) {
		r, err := http.NewRequestWithContext(ctx, method, c.base+sandboxPath(f.sb.ID)+"/archive?"+q.Encode(), strings.NewReader(names))
		if err != nil {
			return nil, fmt.Errorf("making the request: %w", err)
		}
		r.Header.Set("TE", "trailers") // what goes wrong later is told, instead of a cut
		return c.do(r)
	})
	if err != nil {
		return nil, err
	}
	return &ArchiveReader{ctx, c, res}, nil
}

// Read implements io.Reader.
func (r *ArchiveReader) Read(p []byte) (int, error) {
	n, err := r.res.Body.Read(p)
	switch {
	case err == nil:
	case !errors.Is(err, io.EOF):
		err = r.c.explain(r.ctx, err)
	case r.res.Trailer.Get("Dsec-Error") != "":
		err = sandbox.Errorf(sandbox.Internal, "bad_archive", "the archive is incomplete, and the platform's reason cannot be read")
		if told, ok := parseByteError([]byte(r.res.Trailer.Get("Dsec-Error"))); ok {
			err = told
		}
	}
	return n, err
}

// Result says what the archive holds. It is known once all has been read.
func (r *ArchiveReader) Result() (result ArchiveResult) {
	_ = json.Unmarshal([]byte(r.res.Trailer.Get("Dsec-Archive")), &result) // zero where nothing is said
	return result
}

// Close lets go of the connection.
func (r *ArchiveReader) Close() error { return r.res.Body.Close() }

// ArchiveOptions say how an archive is unpacked.
type ArchiveOptions struct {
	KeepOwners     bool // of its entries, instead of all being the user's
	Parents        bool // make the directory and those above it
	NoReplaceTypes bool // refuse to replace a directory by something else, and the reverse
	Progress       func(sent int64)
}

// WriteArchive unpacks a tar archive below a directory. It is sent once: what an attempt has unpacked before it failed stays. A
// *io.PipeReader is closed when no more is wanted, see Piped.
func (f *Files) WriteArchive(ctx context.Context, dir string, tar io.Reader, o ArchiveOptions) (result ArchiveResult, err error) {
	q := f.query(dir)
	for name, on := range map[string]bool{"keep_owners": o.KeepOwners, "parents": o.Parents, "no_replace_types": o.NoReplaceTypes} {
		if on {
			q.Set(name, "1")
		}
	}
	c := f.sb.c
	src := &source{r: tar, report: o.Progress}
	res, err := c.send(ctx, http.MethodPut, sandboxPath(f.sb.ID)+"/archive", q, src, -1, http.Header{"Content-Type": {"application/x-tar"}})
	if err != nil {
		return result, c.explain(ctx, err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxErrorBody))
	if err != nil {
		return result, c.explain(ctx, err)
	}
	_ = json.Unmarshal(raw, &result) // zero where nothing is said
	return result, nil
}
