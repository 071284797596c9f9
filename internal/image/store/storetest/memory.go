package storetest

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"dsec/internal/image"
	"dsec/internal/image/store"
	"dsec/sandbox"
)

// Memory is a store for tests: it passes the suite and syncs nothing.
type Memory struct {
	mu    sync.Mutex
	blobs map[string][]byte
}

// NewMemory makes an empty store.
func NewMemory() *Memory { return &Memory{blobs: map[string][]byte{}} }

var _ store.Store = (*Memory)(nil)

// Create implements store.Store.
func (m *Memory) Create(ctx context.Context) (store.Writer, error) {
	return &memoryWriter{m: m}, ctx.Err()
}

func (m *Memory) get(ctx context.Context, digest string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !image.ValidDigest(digest) {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "bad_digest", "%.80q is not a digest", digest)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.blobs[digest]
	if !ok {
		return nil, sandbox.Errorf(sandbox.NotFound, "blob_not_found", "the image store has no blob %s", digest)
	}
	return b, nil
}

// Open implements store.Store.
func (m *Memory) Open(ctx context.Context, digest string) (store.Object, error) {
	b, err := m.get(ctx, digest)
	if err != nil {
		return nil, err
	}
	return memoryObject{bytes.NewReader(b)}, nil
}

// Stat implements store.Store.
func (m *Memory) Stat(ctx context.Context, digest string) (image.Blob, error) {
	b, err := m.get(ctx, digest)
	if err != nil {
		return image.Blob{}, err
	}
	return image.Blob{Digest: digest, Size: int64(len(b))}, nil
}

// List implements store.Store.
func (m *Memory) List(ctx context.Context, yield func(image.Blob) error) error {
	m.mu.Lock()
	blobs := maps.Clone(m.blobs)
	m.mu.Unlock()
	for _, digest := range slices.Sorted(maps.Keys(blobs)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := yield(image.Blob{Digest: digest, Size: int64(len(blobs[digest]))}); err != nil {
			return err
		}
	}
	return nil
}

// Remove implements store.Store.
func (m *Memory) Remove(ctx context.Context, digest string) error {
	_, err := m.get(ctx, digest)
	switch {
	case sandbox.ReasonOf(err) == "blob_not_found":
		return nil
	case err != nil:
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.blobs, digest)
	return nil
}

// Damage changes a byte of a blob.
func (m *Memory) Damage(digest string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := bytes.Clone(m.blobs[digest])
	b[0] ^= 1
	m.blobs[digest] = b
}

type memoryObject struct{ *bytes.Reader }

func (memoryObject) Close() error { return nil }

type memoryWriter struct {
	m     *Memory
	buf   bytes.Buffer
	ended bool
}

var errEnded = errors.New("the blob was committed or aborted before")

func (w *memoryWriter) Write(b []byte) (int, error) {
	if w.ended {
		return 0, errEnded
	}
	return w.buf.Write(b)
}

func (w *memoryWriter) Sum() (image.Blob, error) {
	if w.ended {
		return image.Blob{}, errEnded
	}
	return blobOf(w.buf.Bytes()), nil
}

func (w *memoryWriter) Commit(ctx context.Context) (image.Blob, error) {
	b, err := w.Sum()
	w.ended = true
	if err := errors.Join(err, ctx.Err()); err != nil {
		return image.Blob{}, err
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.m.blobs[b.Digest] = w.buf.Bytes()
	return b, nil
}

func (w *memoryWriter) Abort() error {
	w.ended = true
	return nil
}
