package store

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"dsec/internal/image"
	"dsec/sandbox"
)

// Posix keeps blobs as files of one directory, which may be shared by several processes and, on a cluster file system, by
// several machines:
//
//	blobs/sha256/ab/abcd…   published, mode 0444
//	tmp/<writer>/…          not yet published; <writer> is one Posix value
//	tmp/<writer>.lock       held by flock(2) as long as that value's process lives
//
// A blob appears by link(2) after its bytes were synced, and its directory is synced before Commit returns. A start
// removes the temporary files of writers whose lock nobody holds. The files must be on a file system from which the
// kernel mounts EROFS: not on tmpfs, not on overlayfs.
type Posix struct {
	root string
	temp *tempDir
}

const (
	blobDir  = "blobs/sha256"
	tempName = "tmp"
)

// OpenPosix opens the store in dir, which it creates if need be, and removes what dead writers left. Close it.
func OpenPosix(dir string) (*Posix, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	for _, d := range []string{blobDir, tempName} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return nil, storeError("create", root, err)
		}
	}
	if err := sweepTemp(filepath.Join(root, tempName)); err != nil {
		return nil, storeError("clean", root, err)
	}
	temp, err := newTempDir(filepath.Join(root, tempName))
	if err != nil {
		return nil, storeError("open", root, err)
	}
	return &Posix{root: root, temp: temp}, nil
}

// Close ends the store's writers' directory. Blobs that were not committed are gone.
func (p *Posix) Close() error { return p.temp.close() }

// Path is where a blob's file is, for mounting, whether or not it is there. A bad digest has no path: "".
func (p *Posix) Path(digest string) string {
	if !image.ValidDigest(digest) {
		return ""
	}
	h := strings.TrimPrefix(digest, image.DigestPrefix)
	return filepath.Join(p.root, blobDir, h[:2], h)
}

// path is Path for a digest from outside.
func (p *Posix) path(digest string) (string, error) {
	if path := p.Path(digest); path != "" {
		return path, nil
	}
	return "", sandbox.Errorf(sandbox.InvalidArgument, "bad_digest", "%.80q is not a digest: write sha256: and 64 hex digits", digest)
}

// Open implements Store.
func (p *Posix) Open(ctx context.Context, digest string) (Object, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	path, err := p.path(digest)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, blobError("open", digest, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("file of mode %v", st.Mode())
	}
	if err != nil {
		f.Close()
		return nil, storeError("open", digest, err)
	}
	return &posixObject{File: f, size: st.Size()}, nil
}

type posixObject struct {
	*os.File
	size int64
}

func (o *posixObject) Size() int64 { return o.size }

// Stat implements Store.
func (p *Posix) Stat(ctx context.Context, digest string) (image.Blob, error) {
	if err := ctx.Err(); err != nil {
		return image.Blob{}, err
	}
	path, err := p.path(digest)
	if err != nil {
		return image.Blob{}, err
	}
	st, err := os.Lstat(path)
	if err != nil {
		return image.Blob{}, blobError("stat", digest, err)
	}
	return image.Blob{Digest: digest, Size: st.Size()}, nil
}

// List implements Store. Files that are not named by a digest are ignored.
func (p *Posix) List(ctx context.Context, yield func(image.Blob) error) error {
	dir := filepath.Join(p.root, blobDir)
	prefixes, err := os.ReadDir(dir)
	if err != nil {
		return storeError("list", dir, err)
	}
	for _, prefix := range prefixes {
		entries, err := os.ReadDir(filepath.Join(dir, prefix.Name()))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			continue
		}
		if err != nil {
			return storeError("list", dir, err)
		}
		for _, e := range entries {
			if err := ctx.Err(); err != nil {
				return err
			}
			digest := image.DigestPrefix + e.Name()
			info, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) || !image.ValidDigest(digest) || e.Name()[:2] != prefix.Name() {
				continue
			}
			if err != nil {
				return storeError("list", digest, err)
			}
			if err := yield(image.Blob{Digest: digest, Size: info.Size()}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Remove implements Store.
func (p *Posix) Remove(ctx context.Context, digest string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path, err := p.path(digest)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return storeError("remove", digest, err)
	}
	return nil
}

// Create implements Store.
func (p *Posix) Create(ctx context.Context) (Writer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := p.temp.create()
	if err != nil {
		return nil, storeError("create", "a blob", err)
	}
	w := &posixWriter{store: p, file: f}
	w.sink = sink{file: f, hash: sha256.New()}
	w.buf = bufio.NewWriterSize(&w.sink, 1<<20)
	return w, nil
}

// sink hashes and writes each piece at the same time, and has the disk start early, so that Commit's sync is short.
type sink struct {
	file    *os.File
	hash    hash.Hash
	written int64
	started int64 // up to where the disk was told to start
}

const writebackPiece = 8 << 20

func (s *sink) Write(p []byte) (int, error) {
	if len(p) < 64<<10 { // a goroutine is not worth it
		s.hash.Write(p)
		n, err := s.file.Write(p)
		s.written += int64(n)
		return n, err
	}
	hashed := make(chan struct{})
	go func() {
		defer close(hashed)
		s.hash.Write(p)
	}()
	n, err := s.file.Write(p)
	<-hashed
	s.written += int64(n)
	if s.written-s.started >= writebackPiece {
		startWriteback(s.file, s.started, s.written-s.started)
		s.started = s.written
	}
	return n, err
}

// posixWriter hashes and writes in large pieces, whatever the sizes of its caller's.
type posixWriter struct {
	store *Posix
	file  *os.File // nil once it has ended
	sink  sink
	buf   *bufio.Writer // above sink
	size  int64
	err   error // the first failure of a write; it is final
}

var errEnded = errors.New("the blob was committed or aborted before")

func (w *posixWriter) Write(b []byte) (int, error) {
	if w.file == nil {
		return 0, errEnded
	}
	n, err := w.buf.Write(b)
	w.size += int64(n)
	if err != nil {
		w.err = storeError("write", "a blob", err)
	}
	return n, w.err
}

func (w *posixWriter) Sum() (image.Blob, error) {
	if w.file == nil {
		return image.Blob{}, errEnded
	}
	if w.err == nil {
		if err := w.buf.Flush(); err != nil {
			w.err = storeError("write", "a blob", err)
		}
	}
	if w.err != nil {
		return image.Blob{}, w.err
	}
	return image.Blob{Digest: formatDigest(w.sink.hash), Size: w.size}, nil
}

func (w *posixWriter) Commit(ctx context.Context) (image.Blob, error) {
	if w.file == nil {
		return image.Blob{}, errEnded
	}
	defer w.Abort()
	if err := ctx.Err(); err != nil {
		return image.Blob{}, err
	}
	b, err := w.Sum()
	if err != nil {
		return image.Blob{}, err
	}
	if err := w.file.Chmod(0o444); err != nil {
		return image.Blob{}, storeError("publish", b.Digest, err)
	}
	if err := w.file.Sync(); err != nil {
		return image.Blob{}, storeError("sync", b.Digest, err)
	}
	if err := ctx.Err(); err != nil {
		return image.Blob{}, err
	}
	if err := w.store.publish(w.file.Name(), b); err != nil {
		return image.Blob{}, storeError("publish", b.Digest, err)
	}
	return b, nil
}

func (w *posixWriter) Abort() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	w.buf = nil
	if err := errors.Join(f.Close(), os.Remove(f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove temporary blob: %w", err)
	}
	return nil
}

// publish links a synced file under its digest. A file of that name with another size is damaged, and is replaced. The
// directories are synced in any case: another writer may have linked the name and not yet synced it.
func (p *Posix) publish(temp string, b image.Blob) error {
	path := p.Path(b.Digest)
	dir := filepath.Dir(path)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := appear(temp, path, b.Size); err != nil {
		return err
	}
	return syncDir(dir)
}

func appear(temp, path string, size int64) error {
	err := os.Link(temp, path)
	switch {
	case errors.Is(err, fs.ErrExist):
		st, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) { // it was removed in between
			return os.Rename(temp, path)
		}
		if err == nil && (st.Size() != size || !st.Mode().IsRegular()) {
			return os.Rename(temp, path)
		}
		return err
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.ENOTSUP): // a file system without links
		return os.Rename(temp, path)
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// tempDir is where one Posix value writes.
type tempDir struct {
	dir  string
	lock *os.File

	mu sync.Mutex
	n  int
}

func newTempDir(parent string) (*tempDir, error) {
	var b [10]byte
	for {
		rand.Read(b[:])
		dir := filepath.Join(parent, hex.EncodeToString(b[:]))
		lock, err := createLocked(dir + lockSuffix)
		if errors.Is(err, errLockTaken) { // a sweep took it for a dead writer's: try again
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			lock.Close()
			return nil, err
		}
		return &tempDir{dir: dir, lock: lock}, nil
	}
}

func (t *tempDir) create() (*os.File, error) {
	t.mu.Lock()
	t.n++
	name := filepath.Join(t.dir, fmt.Sprint(t.n))
	t.mu.Unlock()
	return os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
}

func (t *tempDir) close() error {
	return errors.Join(os.RemoveAll(t.dir), os.Remove(t.lock.Name()), t.lock.Close())
}

// blobError is storeError where a missing file means a missing blob.
func blobError(verb, digest string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return sandbox.Errorf(sandbox.NotFound, "blob_not_found", "the image store has no blob %s", digest).WithCause(err)
	}
	return storeError(verb, digest, err)
}

// storeError gives what a user can act on its class; what names a blob or a directory.
func storeError(verb, what string, err error) error {
	var known *sandbox.Error
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.Errorf(sandbox.Unavailable, "store_unavailable",
			"the image store's directory is gone; check its file system and start again").WithCause(err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Errorf(sandbox.ResourceExhausted, "store_full",
			"the image store has no space left; remove environments that are not needed, or enlarge its disk").WithCause(err)
	}
	return fmt.Errorf("%s %s in image store: %w", verb, what, err)
}
