package layers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"dsec/internal/image"
	"dsec/internal/linux"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// hashBlock is how much is hashed between two looks at the context.
const hashBlock = 1 << 20

// validate checks the form of a source, before a digest becomes a path.
func validate(s rootfs.Source) error {
	if len(s.Data) > image.MaxBlobs {
		return sandbox.Errorf(sandbox.InvalidArgument, "bad_layer", "a layer with %d data blobs; at most %d", len(s.Data), image.MaxBlobs)
	}
	for _, f := range append([]rootfs.File{s.Metadata}, s.Data...) {
		if !image.ValidDigest(f.Digest) || f.Size < 0 {
			return sandbox.Errorf(sandbox.InvalidArgument, "bad_layer", "%.80q of %d bytes is no file of a layer", f.Digest, f.Size)
		}
	}
	return nil
}

// keyOf names a layer by all its digests, in their order.
func keyOf(s rootfs.Source) string {
	h := sha256.New()
	for _, f := range append([]rootfs.File{s.Metadata}, s.Data...) {
		fmt.Fprintf(h, "%s\n", f.Digest)
	}
	return hexSum(h)
}

// isKey reports whether s may be a layer's key, which has the form of a digest without its kind.
func isKey(s string) bool { return image.ValidDigest("sha256:" + s) }

func hexSum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// mount verifies and mounts one layer. On an error nothing is left.
func (m *Mounts) mount(ctx context.Context, l *layer, s rootfs.Source) error {
	metadata, err := openFile(s.Metadata)
	if err != nil {
		return err
	}
	defer metadata.Close()
	if err := checkDigest(ctx, metadata, s.Metadata); err != nil {
		return err
	}
	data := make([]*os.File, 0, len(s.Data))
	for _, f := range s.Data {
		d, err := openFile(f)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := m.checkBlob(ctx, d, f); err != nil {
			return err
		}
		data = append(data, d)
	}
	if err := os.Mkdir(l.dir, 0o700); err != nil {
		return fmt.Errorf("make the mount point of a layer: %w", err)
	}
	if err := m.mountFiles(l, metadata, data); err != nil {
		return errors.Join(err, linux.RemoveDir(l.dir))
	}
	return nil
}

func (m *Mounts) mountFiles(l *layer, metadata *os.File, data []*os.File) error {
	err := linux.MountErofs(l.dir, l.dir+".erofs", metadata, data)
	if err == nil {
		m.log.Debug("mounted a layer", "path", l.dir, "metadata", metadata.Name())
		return nil
	}
	if linux.NeedsLoop(err) {
		if err = linux.MountErofsLoop(l.dir, metadata, data); err == nil {
			m.fallbacks.Add(1)
			m.log.Warn("mounted a layer through loop devices: its file system cannot be read directly", "layer", metadata.Name())
			return nil
		}
	}
	return sandbox.Errorf(sandbox.DataLoss, "layer_unmountable",
		"the kernel refuses to mount a layer of this environment, although its digest is right; make the environment anew").WithCause(err)
}

// openFile opens a file of the store and checks that it is one, of the right size.
func openFile(want rootfs.File) (*os.File, error) {
	// Not blocking: what should be a file may be a FIFO.
	f, err := os.OpenFile(want.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.NotFound, "layer_missing",
			"file %s of this environment is not in the image store of this node; make or pull the environment again", want.Digest).WithCause(err)
	} else if err != nil {
		return nil, fmt.Errorf("open a layer: %w", err)
	}
	st, err := f.Stat()
	if err == nil && (!st.Mode().IsRegular() || st.Size() != want.Size) {
		err = corrupt(want, fmt.Sprintf("it is a %v of %d bytes, and should be a file of %d", st.Mode().Type(), st.Size(), want.Size))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// checkBlob verifies a blob, unless this very file was verified since the run directory was made.
func (m *Mounts) checkBlob(ctx context.Context, f *os.File, want rootfs.File) error {
	id, err := linux.FileID(f)
	if err != nil {
		return err
	}
	note := filepath.Join(m.verified, strings.TrimPrefix(want.Digest, "sha256:"))
	if known, err := os.ReadFile(note); err == nil && string(known) == id {
		return nil
	}
	if err := checkDigest(ctx, f, want); err != nil {
		return err
	}
	if err := os.WriteFile(note, []byte(id), 0o600); err != nil {
		m.log.Warn("cannot note that a blob was verified", "digest", want.Digest, "error", err)
	}
	return nil
}

func checkDigest(ctx context.Context, f *os.File, want rootfs.File) error {
	linux.AdviseSequential(f)
	h := sha256.New()
	r := io.NewSectionReader(f, 0, want.Size)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		_, err := io.CopyN(h, r, hashBlock)
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("read a layer: %w", err)
		}
	}
	if got := "sha256:" + hexSum(h); got != want.Digest {
		return corrupt(want, "its content has digest "+got)
	}
	return nil
}

func corrupt(want rootfs.File, how string) error {
	return sandbox.Errorf(sandbox.DataLoss, "layer_corrupt",
		"file %s of this environment is damaged in the image store: %s; remove the environment and make it again", want.Digest, how)
}
