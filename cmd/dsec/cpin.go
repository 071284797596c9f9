package main

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
	"dsec/internal/image/archive"
	"dsec/internal/pax"
	"dsec/sandbox"
)

// upload copies into the sandbox.
func (t *transfer) upload(ctx context.Context, from, to string) error {
	if from == "-" {
		return t.uploadArchive(ctx, to)
	}
	info, err := t.localInfo(from)
	if errors.Is(err, fs.ErrNotExist) {
		return sandbox.Errorf(sandbox.NotFound, "file_not_found", "there is no %s here", clipText(from))
	}
	if err != nil {
		return err
	}
	target, err := t.remoteTarget(ctx, to)
	if err != nil {
		return err
	}
	full, err := filepath.Abs(from)
	if err != nil {
		return err
	}
	at, err := place(cpSource{path: from, name: lastPart(full), dir: info.IsDir()}, target)
	if err != nil {
		return err
	}
	switch {
	case info.IsDir():
		return t.uploadTree(ctx, from, at, info)
	case info.Mode()&fs.ModeSymlink != 0:
		return t.uploadLink(ctx, from, at)
	}
	return t.uploadFile(ctx, from, at)
}

// localInfo tells about a local source: of a link itself, unless it is to be followed.
func (t *transfer) localInfo(from string) (fs.FileInfo, error) {
	if t.follow || strings.HasSuffix(from, "/") || contentOnly(from) {
		return os.Stat(from)
	}
	return os.Lstat(from)
}

// remoteTarget tells about the target inside, links followed.
func (t *transfer) remoteTarget(ctx context.Context, to string) (cpTarget, error) {
	results, err := t.files.Stat(ctx, true, to)
	if err != nil {
		return cpTarget{}, err
	}
	err = client.FailureError(results[0].GetFailure())
	if sandbox.ClassOf(err) == sandbox.NotFound {
		return cpTarget{path: to}, nil
	}
	return cpTarget{path: to, exists: true, dir: results[0].GetFile().GetType() == dsecv1.FileType_FILE_TYPE_DIRECTORY}, err
}

// wantParent makes sure that there is a directory for a new one: only --parents makes it.
func (t *transfer) wantParent(ctx context.Context, at string) error {
	parent := path.Dir(strings.TrimRight(at, "/"))
	target, err := t.remoteTarget(ctx, parent)
	if err == nil && !target.dir {
		err = sandbox.Errorf(sandbox.NotFound, "no_directory", "there is no directory %s in the sandbox; --parents makes it", clipText(parent))
	}
	return err
}

func (t *transfer) uploadFile(ctx context.Context, from, at string) error {
	f, err := openSource(ctx, from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	t.bar.total = info.Size()
	how := client.WriteOptions{Parents: t.parents, Progress: t.bar.report, Mode: info.Mode().Perm() | fs.ModeIrregular} // 0000 is a mode, too
	if info.Mode().IsRegular() {
		t.bytes = info.Size()
		err = t.files.Write(ctx, at, f, info.Size(), how)
	} else {
		t.bytes, err = t.files.WriteStream(ctx, at, client.Piped(f), how)
	}
	if sandbox.ClassOf(err) == sandbox.NotFound && !t.parents {
		return cmp.Or(t.wantParent(ctx, at), err)
	}
	if err != nil || !t.archive {
		return err
	}
	owner := &dsecv1.SetOwner{Path: at, Owner: ownerOf(info)}
	return t.files.Change(ctx, &dsecv1.FileChange{Change: &dsecv1.FileChange_SetOwner{SetOwner: owner}})
}

// openSource opens a file. A pipe without a writer blocks its opener, who cannot be interrupted: that one is left behind.
func openSource(ctx context.Context, path string) (*os.File, error) {
	type opened struct {
		f   *os.File
		err error
	}
	done := make(chan opened, 1)
	go func() {
		f, err := os.Open(path)
		done <- opened{f, err}
	}()
	select {
	case o := <-done:
		return o.f, o.err
	case <-ctx.Done():
		go func() { (<-done).f.Close() }() // a nil file says so, and nobody hears it
		return nil, context.Cause(ctx)
	}
}

func ownerOf(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t) // of a file of Linux, always
	return itoa(int64(st.Uid)) + ":" + itoa(int64(st.Gid))
}

// uploadLink copies a symbolic link as one.
func (t *transfer) uploadLink(ctx context.Context, from, at string) error {
	to, err := os.Readlink(from)
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	go func() {
		p := pax.NewWriter(w)
		err := p.Header(&pax.Header{Name: lastPart(at), Link: to, Type: pax.Symlink, Mode: 0o777})
		w.CloseWithError(errors.Join(err, p.Close()))
	}()
	_, err = t.files.WriteArchive(ctx, path.Dir(at), r, client.ArchiveOptions{Parents: t.parents, NoReplaceTypes: true})
	return err
}

// uploadTree copies the content of a directory into at, which is made if it is not there, and then has the directory's mode and,
// with -a, owner.
func (t *transfer) uploadTree(ctx context.Context, from, at string, info fs.FileInfo) error {
	target, err := t.remoteTarget(ctx, at)
	if err == nil && !target.exists && !t.parents {
		err = t.wantParent(ctx, at)
	}
	if err != nil {
		return err
	}
	src := packDirectory(ctx, t.console, from, archive.Options{RootOwner: !t.archive})
	if err := t.sendArchive(ctx, at, src, true); err != nil || target.exists {
		return err
	}
	changes := []*dsecv1.FileChange{{Change: &dsecv1.FileChange_SetMode{SetMode: &dsecv1.SetMode{Path: at, Mode: uint32(info.Mode().Perm())}}}}
	if t.archive {
		changes = append(changes, &dsecv1.FileChange{Change: &dsecv1.FileChange_SetOwner{SetOwner: &dsecv1.SetOwner{Path: at, Owner: ownerOf(info)}}})
	}
	return t.files.Change(ctx, changes...)
}

// uploadArchive unpacks our standard input into a directory.
func (t *transfer) uploadArchive(ctx context.Context, to string) error {
	if !t.parents {
		target, err := t.remoteTarget(ctx, to)
		if err != nil {
			return err
		}
		if !target.dir {
			return sandbox.Errorf(sandbox.NotFound, "no_directory", "there is no directory %s in the sandbox to unpack into; --parents makes it", clipText(to))
		}
	}
	return t.sendArchive(ctx, to, &archiveSource{Reader: client.Piped(&plainTar{from: t.stdin}), close: func() error { return nil }}, t.parents)
}

// A plainTar is an archive that may be compressed with gzip, which its first read finds out.
type plainTar struct {
	from io.Reader
	tar  io.Reader // nil before
}

func (p *plainTar) Read(b []byte) (int, error) {
	if p.tar == nil {
		in := bufio.NewReaderSize(p.from, 64<<10)
		p.tar = in // what is wrong with it the platform says
		if head, err := in.Peek(2); err == nil && head[0] == 0x1f && head[1] == 0x8b {
			z, err := gzip.NewReader(in)
			if err != nil {
				return 0, err
			}
			p.tar = z
		}
	}
	return p.tar.Read(b)
}

func (t *transfer) sendArchive(ctx context.Context, dir string, src *archiveSource, parents bool) error {
	o := client.ArchiveOptions{KeepOwners: t.archive, Parents: parents, NoReplaceTypes: true, Progress: func(n int64) { t.bytes = n; t.bar.report(n) }}
	result, err := t.files.WriteArchive(ctx, dir, src.Reader, o) // which it closes
	if cerr := src.close(); err == nil {
		err = cerr
	}
	if err == nil && result.Skipped > 0 {
		t.say("%d entries were left out: devices, sockets and the like are not copied", result.Skipped)
	}
	return err
}
