package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/internal/pax"
	"dsec/internal/unpack"
	"dsec/sandbox"
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// download copies out of the sandbox.
func (t *transfer) download(ctx context.Context, from, to string) error {
	if to == "-" {
		return t.downloadArchive(ctx, from)
	}
	info, err := t.remoteInfo(ctx, from)
	if err != nil {
		return err
	}
	target := cpTarget{path: to}
	if st, err := os.Stat(to); err == nil {
		target.exists, target.dir = true, st.IsDir()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	isDir := info.GetType() == dsecv1.FileType_FILE_TYPE_DIRECTORY
	at, err := place(cpSource{path: from, name: lastPart(from), dir: isDir}, target)
	if err != nil {
		return err
	}
	switch info.GetType() {
	case dsecv1.FileType_FILE_TYPE_DIRECTORY:
		return t.downloadTree(ctx, from, at, info)
	case dsecv1.FileType_FILE_TYPE_SYMLINK:
		return replaceLocal(at, func(tmp string) error { return os.Symlink(linkOf(info), tmp) })
	case dsecv1.FileType_FILE_TYPE_REGULAR:
		return t.downloadFile(ctx, from, at, info)
	}
	return sandbox.Errorf(sandbox.InvalidArgument, "not_a_file", "%s is neither a file, a directory nor a link; only these are copied", clipText(from))
}

// remoteInfo tells about a source inside: of a link itself, unless it is to be followed.
func (t *transfer) remoteInfo(ctx context.Context, from string) (*dsecv1.FileInfo, error) {
	follow := t.follow || strings.HasSuffix(from, "/") || contentOnly(from)
	results, err := t.files.Stat(ctx, follow, from)
	if err == nil {
		err = client.FailureError(results[0].GetFailure())
		if sandbox.ClassOf(err) == sandbox.NotFound {
			err = sandbox.Errorf(sandbox.NotFound, sandbox.ReasonOf(err), "there is no %s in the sandbox", clipText(from))
		}
	}
	if err != nil {
		return nil, err
	}
	info := results[0].GetFile()
	if strings.HasSuffix(from, "/") && info.GetType() != dsecv1.FileType_FILE_TYPE_DIRECTORY {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "not_a_directory", "%s is no directory", clipText(from))
	}
	return info, nil
}

// wantLocalParent makes sure that there is a directory here for a new file or directory: as docker cp, nothing makes it.
func wantLocalParent(at string) error {
	parent := filepath.Dir(at)
	if _, err := os.Stat(parent); errors.Is(err, fs.ErrNotExist) {
		return sandbox.Errorf(sandbox.NotFound, "no_directory", "there is no directory %s here", clipText(parent))
	}
	return nil
}

// replaceLocal makes something beside a local name, and renames it.
func replaceLocal(at string, make func(tmp string) error) error {
	if st, err := os.Lstat(at); err == nil && st.IsDir() {
		return sandbox.Errorf(sandbox.FailedPrecondition, "not_replaced", "%s is a directory, and is not replaced by a file; remove it first", clipText(at))
	}
	if err := wantLocalParent(at); err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(at), ".dsec-cp-"+client.NewKey()[:12])
	err := make(tmp)
	if err == nil {
		err = os.Rename(tmp, at)
	}
	if err != nil {
		_ = os.Remove(tmp) // it may not be there
	}
	return err
}

// downloadFile copies a file. After a lost connection it goes on where it was.
func (t *transfer) downloadFile(ctx context.Context, from, at string, info *dsecv1.FileInfo) error {
	t.bar.total = info.GetSize()
	if st, err := os.Stat(at); err == nil && !st.IsDir() && !st.Mode().IsRegular() { // a device or pipe is written, not replaced
		f, err := os.OpenFile(at, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = t.fetch(ctx, from, f)
		return errors.Join(err, f.Close())
	}
	if real, err := filepath.EvalSymlinks(at); err == nil {
		at = real
	}
	return replaceLocal(at, func(tmp string) (err error) {
		f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("making the target: %w", err)
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		opened, err := t.fetch(ctx, from, f)
		if err != nil {
			return err
		}
		if err := t.attributes(ctx, from, f); err != nil {
			return err
		}
		if t.archive && os.Geteuid() == 0 {
			if err := f.Chown(opened.UID, opened.GID); err != nil {
				return err
			}
		}
		if err := f.Chmod(opened.Mode.Perm()); err != nil { // nothing from a sandbox becomes set-user-id here
			return err
		}
		if at := info.GetModifiedAt(); at != nil {
			return os.Chtimes(tmp, at.AsTime(), at.AsTime())
		}
		return nil
	})
}

// sayLost tells of attributes that do not exist here, or would give rights.
func (t *transfer) sayLost(r *unpack.Result) {
	if r.AttributesLost > 0 {
		t.say("%d extended attributes were not kept, such as %s", r.AttributesLost, clipText(strings.Join(r.LostNames, ", ")))
	}
}

// attributes gives f those of a file inside. They come with an archive only: of it, no more than the beginning is read.
func (t *transfer) attributes(ctx context.Context, from string, f *os.File) error {
	in, err := t.files.ReadArchive(ctx, from, false)
	if sandbox.ClassOf(err) == sandbox.NotFound { // it is gone by now
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	h, err := pax.NewReader(in).Next()
	if err != nil || h.Type != pax.File { // it is another thing by now, or a link that was followed
		return err
	}
	var result unpack.Result
	result.Attributes(f, h.Xattrs)
	t.sayLost(&result)
	return nil
}

func (t *transfer) fetch(ctx context.Context, from string, to io.Writer) (*client.File, error) {
	f, err := t.files.Read(ctx, from, client.ReadOptions{})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	_, err = io.Copy(to, &counted{f, t})
	return f, err
}

// A counted reader shows the progress.
type counted struct {
	io.Reader
	t *transfer
}

func (r *counted) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.t.bytes += int64(n)
	r.t.bar.report(r.t.bytes)
	return n, err
}

// downloadTree copies the content of a directory into at, which is made.
func (t *transfer) downloadTree(ctx context.Context, from, at string, info *dsecv1.FileInfo) error {
	made := false
	if err := os.Mkdir(at, 0o700); err == nil {
		made = true
	} else if err := wantLocalParent(at); err != nil {
		return err
	} else if st, serr := os.Stat(at); serr != nil || !st.IsDir() {
		return err
	}
	in, err := t.files.ReadArchive(ctx, from, true)
	if err != nil {
		return err
	}
	defer in.Close()
	keep := t.archive && os.Geteuid() == 0
	result, err := unpack.Tree(at, &counted{in, t}, unpack.Options{KeepOwners: keep})
	if err != nil {
		return err
	}
	if n := result.Skipped + in.Result().Skipped; n > 0 {
		t.say("%d entries were left out: devices, sockets and the like are not copied", n)
	}
	t.sayLost(&result)
	if !made {
		return nil
	}
	if keep {
		if err := os.Lchown(at, int(info.GetUid()), int(info.GetGid())); err != nil {
			return err
		}
	}
	if err := os.Chmod(at, fs.FileMode(info.GetMode())&fs.ModePerm); err != nil {
		return err
	}
	return os.Chtimes(at, info.GetModifiedAt().AsTime(), info.GetModifiedAt().AsTime())
}

// downloadArchive writes a tar archive to our standard output.
func (t *transfer) downloadArchive(ctx context.Context, from string) error {
	in, err := t.files.ReadArchive(ctx, from, contentOnly(from))
	if err != nil {
		return err
	}
	defer in.Close()
	return t.pour(&counted{in, t})
}
