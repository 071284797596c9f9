package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// Files are the files of a sandbox, with the rights of one user.
type Files struct {
	sb   *Sandbox
	user string
}

// Files are the sandbox's files with the rights of user; "" = the sandbox's.
func (s *Sandbox) Files(user string) *Files { return &Files{s, user} }

func (f *Files) query(path string) url.Values {
	q := url.Values{"path": {path}}
	if f.user != "" {
		q.Set("user", f.user)
	}
	return q
}

// ReadOptions say what of a file is wanted.
type ReadOptions struct {
	Offset int64
	Length int64 // 0 = to the end
}

// A File is a file's content that is being read. After a lost connection it goes on where it was, unless the file has
// changed: then it fails with reason "file_changed". One goroutine reads.
type File struct {
	Mode     fs.FileMode // permission bits, setuid, setgid and sticky
	UID, GID int
	Modified time.Time
	Size     int64 // of what is being read; -1 = unknown

	ctx     context.Context // of the reads: an io.Reader has no other way to get one
	cancel  context.CancelFunc
	f       *Files
	path    string
	offset  int64
	left    int64 // of the wanted length; -1 = to the end
	version string
	body    io.ReadCloser
	outage  outage
	err     error
}

// Read opens a file. The caller closes it.
func (f *Files) Read(ctx context.Context, path string, o ReadOptions) (*File, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := &File{ctx: ctx, cancel: cancel, f: f, path: path, offset: o.Offset, left: -1}
	if o.Length > 0 {
		r.left = o.Length
	}
	for r.body == nil && r.err == nil {
		r.open()
	}
	if r.err != nil {
		cancel()
		return nil, r.err
	}
	return r, nil
}

// ReadFile is the whole content of a file.
func (f *Files) ReadFile(ctx context.Context, path string) ([]byte, error) {
	r, err := f.Read(ctx, path, ReadOptions{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func (r *File) open() {
	q := r.f.query(r.path)
	if r.offset > 0 {
		q.Set("offset", strconv.FormatInt(r.offset, 10))
	}
	if r.left >= 0 {
		q.Set("length", strconv.FormatInt(r.left, 10))
	}
	c := r.f.sb.c
	res, err := c.request(r.ctx, http.MethodGet, sandboxPath(r.f.sb.ID)+"/files", q, nil)
	if err != nil {
		r.err = c.wait(r.ctx, &r.outage, err)
		return
	}
	version := "mtime " + res.Header.Get("Dsec-Mtime")
	switch {
	case r.version == "":
		r.version = version
		r.describe(res)
	case r.version != version:
		res.Body.Close()
		r.err = sandbox.Errorf(sandbox.FailedPrecondition, "file_changed", "%s changed while it was copied; copy it again", clip(r.path))
		return
	}
	r.body = res.Body
}

func (r *File) describe(res *http.Response) {
	h := res.Header
	r.Size = res.ContentLength
	r.Mode = 0o644
	if m, err := strconv.ParseUint(h.Get("Dsec-Mode"), 8, 32); err == nil {
		r.Mode = FileMode(uint32(m))
	}
	r.UID, _ = strconv.Atoi(h.Get("Dsec-Uid")) // 0 where nothing is said
	r.GID, _ = strconv.Atoi(h.Get("Dsec-Gid"))
	if t, err := time.Parse(time.RFC3339Nano, h.Get("Dsec-Mtime")); err == nil {
		r.Modified = t
	}
}

// FileMode is Go's form of a Unix mode.
func FileMode(mode uint32) fs.FileMode {
	m := fs.FileMode(mode) & fs.ModePerm
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if mode&bit != 0 {
			m |= flag
		}
	}
	return m
}

// Read implements io.Reader.
func (r *File) Read(p []byte) (int, error) {
	for r.err == nil {
		if r.body == nil {
			r.open()
			continue
		}
		n, err := r.body.Read(p)
		r.offset += int64(n)
		if r.left >= 0 {
			r.left -= int64(n)
		}
		if n > 0 {
			r.outage.over()
		}
		if err != nil {
			r.body.Close()
			r.body = nil
			if errors.Is(err, io.EOF) {
				r.err = io.EOF
			} else {
				r.err = r.f.sb.c.wait(r.ctx, &r.outage, err)
			}
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// WriteTo implements io.WriterTo. A failure of w is a *WriteError.
func (r *File) WriteTo(w io.Writer) (int64, error) { return copyTo(w, r) }

// Close lets go of the connection.
func (r *File) Close() error {
	r.cancel()
	if r.body != nil {
		return r.body.Close()
	}
	return nil
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	Mode      fs.FileMode // permission bits, others are ignored; 0 = 0644, fs.ModeIrregular alone = 0000
	Parents   bool        // make missing directories
	Exclusive bool        // refuse to replace
	Progress  func(sent int64)
}

func (o WriteOptions) query(q url.Values) url.Values {
	if o.Mode != 0 {
		q.Set("mode", fmt.Sprintf("%04o", o.Mode.Perm()))
	}
	for name, on := range map[string]bool{"parents": o.Parents, "exclusive": o.Exclusive} {
		if on {
			q.Set(name, "1")
		}
	}
	return q
}

// Write makes or replaces a file of what can be read twice: first for its digest, which the platform checks, and again after a
// lost connection. The file appears whole or not at all.
func (f *Files) Write(ctx context.Context, path string, content io.ReaderAt, size int64, o WriteOptions) error {
	sum := sha256.New()
	if n, err := io.Copy(sum, io.NewSectionReader(content, 0, size)); err != nil || n != size {
		return &ReadError{errors.Join(err, shortInput(n, size))}
	}
	header := http.Header{"Dsec-Sha256": {hex.EncodeToString(sum.Sum(nil))}}
	_, err := call(ctx, f.sb.c, func(ctx context.Context) (struct{}, error) {
		_, err := f.put(ctx, "/files", o.query(f.query(path)), io.NewSectionReader(content, 0, size), size, header, o.Progress)
		return struct{}{}, err
	})
	return err
}

func shortInput(n, size int64) error {
	if n == size {
		return nil
	}
	return fmt.Errorf("%d of %d bytes could be read", n, size)
}

// WriteStream makes or replaces a file of what can be read once; it is sent once. The file appears whole or not at all. A *io.PipeReader is closed
// when no more is wanted, see Piped.
func (f *Files) WriteStream(ctx context.Context, path string, content io.Reader, o WriteOptions) (int64, error) {
	return f.put(ctx, "/files", o.query(f.query(path)), content, -1, nil, o.Progress)
}

// Append adds to the end of a file, which is made if there is none. It is sent once: what an attempt has added before it failed
// stays.
func (f *Files) Append(ctx context.Context, path string, content io.Reader, o WriteOptions) (int64, error) {
	q := o.query(f.query(path))
	q.Set("append", "1")
	return f.put(ctx, "/files", q, content, -1, nil, o.Progress)
}

// put sends a body of size bytes, or of unknown length if size is negative.
func (f *Files) put(ctx context.Context, what string, q url.Values, body io.Reader, size int64, header http.Header, report func(int64)) (int64, error) {
	src := &source{r: body, report: report}
	res, err := f.sb.c.send(ctx, http.MethodPut, sandboxPath(f.sb.ID)+what, q, src, size, header)
	if err == nil {
		err = drain(res)
	}
	if err != nil {
		err = f.sb.c.explain(ctx, err)
	}
	return src.n.Load(), err
}

// List gives what is in a directory, in no order, with paths relative to it; depth 1 = its own entries, -1 = all below. An error ends it: a listing
// is never silently short.
func (f *Files) List(ctx context.Context, path string, depth int) iter.Seq2[*dsecv1.FileInfo, error] {
	req := rawNames(&dsecv1.ListFilesRequest{SandboxId: f.sb.ID, Path: path, User: f.user, Depth: int32(depth)})
	return func(yield func(*dsecv1.FileInfo, error) bool) {
		for res, err := range receive(ctx, f.sb.c, f.sb.c.sandboxes.ListFiles, req, 0) {
			if err != nil {
				yield(nil, err)
				return
			}
			for _, e := range res.GetFiles() {
				if !yield(e, nil) {
					return
				}
			}
		}
	}
}

// Stat tells about each path by itself: what is missing is a failure among the results, see FailureError. follow also follows
// links at the end of a path.
func (f *Files) Stat(ctx context.Context, follow bool, paths ...string) ([]*dsecv1.StatResult, error) {
	req := rawNames(&dsecv1.StatFilesRequest{SandboxId: f.sb.ID, Paths: paths, User: f.user, Follow: follow})
	res, err := invoke(ctx, f.sb.c, f.sb.c.sandboxes.StatFiles, req)
	if err == nil && len(res.GetResults()) != len(paths) {
		err = sandbox.Errorf(sandbox.Internal, "bad_answer", "the platform has answered for %d of %d paths", len(res.GetResults()), len(paths))
	}
	return res.GetResults(), err
}

// Change makes changes in order and stops at the first that fails; the error's fact "index" says which. They are sent once: an
// answer that got lost may be to changes that were made. Names in them need not be UTF-8.
func (f *Files) Change(ctx context.Context, changes ...*dsecv1.FileChange) error {
	_, err := invokeOnce(ctx, f.sb.c, f.sb.c.sandboxes.ChangeFiles, rawNames(&dsecv1.ChangeFilesRequest{SandboxId: f.sb.ID, User: f.user, Changes: changes}))
	return err
}

// Watch gives what happens below a directory: first `ready`, from which on everything is seen, then events. A lost connection is an
// error: what happened meanwhile is not known.
func (f *Files) Watch(ctx context.Context, path string, recursive bool) iter.Seq2[*dsecv1.WatchFilesResponse, error] {
	req := rawNames(&dsecv1.WatchFilesRequest{SandboxId: f.sb.ID, Path: path, User: f.user, Recursive: recursive})
	return receive(ctx, f.sb.c, f.sb.c.sandboxes.WatchFiles, req, 0)
}
