// Package store is where images are kept: immutable blobs, named by the SHA-256 of their bytes. It holds the contract, and
// Posix, which keeps them in a directory of a POSIX file system. storetest is the suite that every implementation passes.
//
// # Words
//
// A blob is published when Commit has returned: from then on it is whole, durable, and never changes. Before that nobody
// sees any of it; if the writer, its process or the machine ends, nothing of it stays for longer than until the next start.
// Publishing what is there already succeeds, also for several writers at once: names are digests, so there is nothing to
// overwrite.
//
// The store is trusted, and yet a blob can be damaged by the disk below it. Open does not check content, for it would have
// to read all of it; ReadAll and Verify do. Whoever lets the kernel parse bytes checks them first.
//
// Control plane code links this package and builds on any OS: it imports no internal/linux.
package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"

	"dsec/internal/image"
	"dsec/sandbox"
)

// Store is the contract. Methods may be called concurrently. A digest is always "sha256:" and 64 lower-case hex digits;
// anything else is InvalidArgument "bad_digest" and never becomes a path. Other errors that a user can do something about:
// NotFound "blob_not_found", ResourceExhausted "store_full", DataLoss "blob_corrupt", Unavailable "store_unavailable".
type Store interface {
	// Create starts a blob. The caller ends it with Commit or Abort.
	Create(ctx context.Context) (Writer, error)
	// Open gives a published blob's bytes.
	Open(ctx context.Context, digest string) (Object, error)
	// Stat says whether a blob is published, and how large it is.
	Stat(ctx context.Context, digest string) (image.Blob, error)
	// List yields every published blob in no order, and stops at the first error of yield. What is published or removed
	// meanwhile may or may not be seen.
	List(ctx context.Context, yield func(image.Blob) error) error
	// Remove takes a blob away. That it was not there is no error. Readers that have it open keep their bytes.
	Remove(ctx context.Context, digest string) error
}

// A Writer takes one blob's bytes. It is not safe for concurrent use.
type Writer interface {
	io.Writer
	// Sum is the blob that Commit would publish. More may be written after it. It fails if a write has failed.
	Sum() (image.Blob, error)
	// Commit makes the bytes durable and publishes them. It ends the writer also when it fails.
	Commit(ctx context.Context) (image.Blob, error)
	// Abort drops what was written. After Commit or Abort it does nothing, so it can be deferred.
	Abort() error
}

// An Object is an open blob.
type Object interface {
	io.Reader
	io.ReaderAt
	io.Closer
	Size() int64
}

// ReadAll reads a blob of at most limit bytes and checks its digest.
func ReadAll(ctx context.Context, st Store, digest string, limit int64) ([]byte, error) {
	o, err := st.Open(ctx, digest)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if o.Size() > limit {
		return nil, sandbox.Errorf(sandbox.DataLoss, "blob_corrupt", "blob %s has %d bytes; what it should hold has at most %d", digest, o.Size(), limit)
	}
	b, err := io.ReadAll(io.LimitReader(o, limit+1))
	if err != nil {
		return nil, storeError("read", digest, err)
	}
	if got := digestOf(b); got != digest {
		return nil, corrupt(digest, got)
	}
	return b, nil
}

// Verify reads a whole blob and checks its digest.
func Verify(ctx context.Context, st Store, digest string) error {
	o, err := st.Open(ctx, digest)
	if err != nil {
		return err
	}
	defer o.Close()
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := o.Read(buf)
		h.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return storeError("read", digest, err)
		}
	}
	if got := formatDigest(h); got != digest {
		return corrupt(digest, got)
	}
	return nil
}

func corrupt(digest, got string) error {
	return sandbox.Errorf(sandbox.DataLoss, "blob_corrupt",
		"blob %s is damaged: its bytes have the digest %s; create the environment again", digest, got)
}

func digestOf(b []byte) string {
	h := sha256.New()
	h.Write(b)
	return formatDigest(h)
}

func formatDigest(h hash.Hash) string { return image.DigestPrefix + hex.EncodeToString(h.Sum(nil)) }
