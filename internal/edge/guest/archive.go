package guest

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"time"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

// An ArchiveRead names a tree and with whose rights it is packed ("" = root). With Content a directory's entries are
// packed without itself; with Names these regular files are, each under its name, relative ones below Path.
type ArchiveRead struct {
	Path, User string
	Content    bool
	Follow     bool // a link at Path
	Names      [][]byte
}

// An ArchiveWrite says how an archive is unpacked below the directory Path: what it makes belongs to User, or, if
// KeepOwners, to whom the archive says. NoReplaceTypes refuses to replace a directory by another thing, and the reverse. Now
// means the times of the unpacking instead of the archive's.
type ArchiveWrite struct {
	Path, User                                   string
	KeepOwners, MakeParents, NoReplaceTypes, Now bool
}

// An ArchiveResult is what an archive's end tells.
type ArchiveResult struct {
	Entries    int64 // that were packed or unpacked
	Bytes      int64 // of the archive
	Skipped    int64 // devices, sockets, and what is below /proc and the like
	Changed    int64 // files that changed while they were packed, and became no shorter
	SplitLinks int64 // names of files that were packed as files of their own: too many to remember
	// Problem is the first entry that is left out or not right, though the archive is whole.
	Problem *sandbox.Error
}

func archiveResult(d *aetherv1.Done) (ArchiveResult, error) {
	for _, n := range []uint64{d.Entries, d.Bytes, d.Skipped, d.Changed, d.SplitLinks} {
		if n > math.MaxInt64 {
			return ArchiveResult{}, violation("an archive of impossible size")
		}
	}
	r := ArchiveResult{Entries: int64(d.Entries), Bytes: int64(d.Bytes), Skipped: int64(d.Skipped), Changed: int64(d.Changed), SplitLinks: int64(d.SplitLinks)}
	if d.Problem != nil {
		r.Problem = fromAether(d.Problem, "file_not_found")
	}
	return r, nil
}

// ReadArchive packs a tree inside and streams it as a tar archive. The reader must be closed. Result is for after its end.
func (c *Client) ReadArchive(ctx context.Context, r ArchiveRead) (*ArchiveReader, error) {
	req := &aetherv1.ReadArchive{Path: []byte(r.Path), User: r.User, Content: r.Content, Follow: r.Follow, Names: r.Names}
	b, err := c.open(ctx, &aetherv1.Open{Open: &aetherv1.Open_ReadArchive{ReadArchive: req}}, "file_not_found", requestTimeout)
	if err != nil {
		return nil, err
	}
	c.changed(true)
	return &ArchiveReader{b: b}, nil
}

// An ArchiveReader is an archive that is being packed.
type ArchiveReader struct{ b *ByteStream }

// Read returns io.EOF only where the archive is whole; see also Result.
func (r *ArchiveReader) Read(p []byte) (int, error) {
	_ = r.b.SetReadDeadline(time.Now().Add(stallTimeout)) // never fails
	n, err := r.b.Read(p)
	return n, stalled(err)
}

// Result is what the end told. Call it after Read has returned io.EOF.
func (r *ArchiveReader) Result() (ArchiveResult, error) {
	d, err := r.b.Done()
	if err != nil {
		return ArchiveResult{}, err
	}
	return archiveResult(d)
}

// Close ends the packing, in the middle if need be.
func (r *ArchiveReader) Close() error { return r.b.Close() }

func stalled(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return unresponsive("go on with the archive")
	}
	return err
}

// WriteArchive unpacks a tar archive from r inside. What was unpacked before an error stays.
func (c *Client) WriteArchive(ctx context.Context, w ArchiveWrite, r io.Reader) (ArchiveResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req := &aetherv1.WriteArchive{
		Path: []byte(w.Path), User: w.User, KeepOwners: w.KeepOwners, MakeParents: w.MakeParents, NoReplaceTypes: w.NoReplaceTypes, Now: w.Now,
	}
	b, err := c.open(ctx, &aetherv1.Open{Open: &aetherv1.Open_WriteArchive{WriteArchive: req}}, "file_not_found", requestTimeout)
	if err != nil {
		return ArchiveResult{}, err
	}
	defer b.Close()
	c.changed(true)
	if err := b.fill(r); err != nil {
		return ArchiveResult{}, err
	}
	late := time.AfterFunc(stallTimeout, func() { cancel(unresponsive("finish the archive")) })
	defer late.Stop()
	d, err := b.Done()
	if err != nil {
		return ArchiveResult{}, err
	}
	return archiveResult(d)
}

// fill sends all of r and the end. Where aether gives up before, its reason is the error.
func (b *ByteStream) fill(r io.Reader) error {
	buf := make([]byte, wire.MaxData)
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			_ = b.SetWriteDeadline(time.Now().Add(stallTimeout)) // never fails
			if _, err := b.Write(buf[:n]); err != nil {
				return stalled(err)
			}
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return b.CloseWrite()
		case rerr != nil:
			return sandbox.Errorf(sandbox.Canceled, "upload_interrupted", "reading the archive failed; what came before is unpacked").WithCause(rerr)
		}
	}
}
