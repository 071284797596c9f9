// Package storetest is the suite that every implementation of store.Store passes.
package storetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"dsec/internal/image"
	"dsec/internal/image/store"
	"dsec/sandbox"
)

// Run runs the suite. open gives an empty store; damage changes one byte of a published blob behind the store's back.
func Run(t *testing.T, open func(t *testing.T) store.Store, damage func(t *testing.T, st store.Store, digest string)) {
	for name, test := range map[string]func(*testing.T, store.Store){
		"RoundTrip":           roundTrip,
		"NothingBeforeCommit": nothingBeforeCommit,
		"EndedWriters":        endedWriters,
		"SumIsWhatCommits":    sumIsWhatCommits,
		"PutTwice":            putTwice,
		"ConcurrentWriters":   concurrentWriters,
		"Missing":             missing,
		"BadDigests":          badDigests,
		"ListStops":           listStops,
		"OpenSurvivesRemove":  openSurvivesRemove,
		"Cancelled":           cancelled,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
	t.Run("Damage", func(t *testing.T) {
		st := open(t)
		b := Put(t, st, []byte("whole"))
		damage(t, st, b.Digest)
		if _, err := store.ReadAll(t.Context(), st, b.Digest, 100); sandbox.ReasonOf(err) != "blob_corrupt" {
			t.Errorf("ReadAll: %v", err)
		}
		if err := store.Verify(t.Context(), st, b.Digest); sandbox.ReasonOf(err) != "blob_corrupt" {
			t.Errorf("Verify: %v", err)
		}
	})
}

// Put publishes content in one piece.
func Put(t *testing.T, st store.Store, content []byte) image.Blob {
	t.Helper()
	w, err := st.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	b, err := w.Commit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := blobOf(content); b != want {
		t.Fatalf("published %v, want %v", b, want)
	}
	return b
}

func blobOf(content []byte) image.Blob {
	sum := sha256.Sum256(content)
	return image.Blob{Digest: image.DigestPrefix + hex.EncodeToString(sum[:]), Size: int64(len(content))}
}

func list(t *testing.T, st store.Store) []image.Blob {
	t.Helper()
	var all []image.Blob
	if err := st.List(t.Context(), func(b image.Blob) error { all = append(all, b); return nil }); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(all, func(a, b image.Blob) int { return strings.Compare(a.Digest, b.Digest) })
	return all
}

func roundTrip(t *testing.T, st store.Store) {
	r := rand.New(rand.NewPCG(1, 1))
	var want []image.Blob
	for _, size := range []int{0, 1, 4095, 4096, 64<<10 + 1, 3 << 20} {
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(r.Uint32())
		}
		w, err := st.Create(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for rest := content; len(rest) > 0; {
			n := min(len(rest), 1+r.IntN(200_000))
			if k, err := w.Write(rest[:n]); k != n || err != nil {
				t.Fatalf("write: %d, %v", k, err)
			}
			rest = rest[n:]
		}
		b, err := w.Commit(t.Context())
		if err != nil || b != blobOf(content) {
			t.Fatalf("commit: %v, %v", b, err)
		}
		want = append(want, b)
		if got, err := st.Stat(t.Context(), b.Digest); err != nil || got != b {
			t.Errorf("stat: %v, %v", got, err)
		}
		readBack(t, st, b, content)
	}
	slices.SortFunc(want, func(a, b image.Blob) int { return strings.Compare(a.Digest, b.Digest) })
	if got := list(t, st); !slices.Equal(got, want) {
		t.Errorf("list: %v, want %v", got, want)
	}
	for _, b := range want {
		if err := errors.Join(st.Remove(t.Context(), b.Digest), st.Remove(t.Context(), b.Digest)); err != nil {
			t.Error(err)
		}
	}
	if got := list(t, st); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}

func readBack(t *testing.T, st store.Store, b image.Blob, content []byte) {
	t.Helper()
	o, err := st.Open(t.Context(), b.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if o.Size() != b.Size {
		t.Errorf("size %d, want %d", o.Size(), b.Size)
	}
	if len(content) < 10_000 { // it reads byte by byte
		if err := iotest.TestReader(io.NewSectionReader(o, 0, o.Size()), content); err != nil {
			t.Error(err)
		}
	}
	if got, err := io.ReadAll(o); err != nil || !bytes.Equal(got, content) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	if err := store.Verify(t.Context(), st, b.Digest); err != nil {
		t.Error(err)
	}
	if got, err := store.ReadAll(t.Context(), st, b.Digest, b.Size); err != nil || !bytes.Equal(got, content) {
		t.Errorf("ReadAll: %d bytes, %v", len(got), err)
	}
	if _, err := store.ReadAll(t.Context(), st, b.Digest, b.Size-1); err == nil {
		t.Error("ReadAll ignores its limit")
	}
}

func nothingBeforeCommit(t *testing.T, st store.Store) {
	content := []byte(strings.Repeat("x", 3<<20))
	w, err := st.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(content); off += 1 << 19 {
		if _, err := w.Write(content[off : off+1<<19]); err != nil {
			t.Fatal(err)
		}
		if got := list(t, st); len(got) != 0 {
			t.Fatalf("visible after %d bytes: %v", off, got)
		}
	}
	if err := w.Abort(); err != nil {
		t.Fatal(err)
	}
	if got := list(t, st); len(got) != 0 {
		t.Errorf("visible after an abort: %v", got)
	}
}

func endedWriters(t *testing.T, st store.Store) {
	for _, end := range []func(store.Writer) error{
		func(w store.Writer) error { return w.Abort() },
		func(w store.Writer) error { _, err := w.Commit(t.Context()); return err },
	} {
		w, err := st.Create(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(end(w), w.Abort(), w.Abort()); err != nil {
			t.Errorf("abort after an end: %v", err)
		}
		if _, err := w.Write([]byte("x")); err == nil {
			t.Error("write after an end succeeds")
		}
		if _, err := w.Sum(); err == nil {
			t.Error("sum after an end succeeds")
		}
		if _, err := w.Commit(t.Context()); err == nil {
			t.Error("commit after an end succeeds")
		}
	}
}

func sumIsWhatCommits(t *testing.T, st store.Store) {
	w, err := st.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	var content []byte
	for _, piece := range []string{"", "a", "bc", strings.Repeat("d", 2<<20)} {
		if _, err := io.WriteString(w, piece); err != nil {
			t.Fatal(err)
		}
		content = append(content, piece...)
		if got, err := w.Sum(); err != nil || got != blobOf(content) {
			t.Errorf("after %d bytes: %v, %v", len(content), got, err)
		}
	}
	sum := blobOf(content)
	if b, err := w.Commit(t.Context()); err != nil || b != sum {
		t.Errorf("commit: %v, %v", b, err)
	}
}

func putTwice(t *testing.T, st store.Store) {
	Put(t, st, []byte("same"))
	b := Put(t, st, []byte("same"))
	if got := list(t, st); len(got) != 1 || got[0] != b {
		t.Errorf("list: %v", got)
	}
}

func concurrentWriters(t *testing.T, st store.Store) {
	content := bytes.Repeat([]byte("concurrent"), 50_000)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			w, err := st.Create(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			defer w.Abort()
			if _, err := w.Write(content); err != nil {
				t.Error(err)
			}
			if i%4 == 3 {
				return
			}
			if b, err := w.Commit(t.Context()); err != nil || b != blobOf(content) {
				t.Errorf("commit: %v, %v", b, err)
			}
			if err := store.Verify(t.Context(), st, blobOf(content).Digest); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := list(t, st); len(got) != 1 {
		t.Errorf("list: %v", got)
	}
}

func missing(t *testing.T, st store.Store) {
	digest := blobOf([]byte("missing")).Digest
	_, err := st.Open(t.Context(), digest)
	if sandbox.ClassOf(err) != sandbox.NotFound || sandbox.ReasonOf(err) != "blob_not_found" {
		t.Errorf("open: %v", err)
	}
	if _, err = st.Stat(t.Context(), digest); sandbox.ReasonOf(err) != "blob_not_found" {
		t.Errorf("stat: %v", err)
	}
	if err := st.Remove(t.Context(), digest); err != nil {
		t.Errorf("remove: %v", err)
	}
}

func badDigests(t *testing.T, st store.Store) {
	hash := strings.Repeat("a", 64)
	for _, digest := range []string{"", hash, "sha256:", "sha256:" + hash[1:], "sha256:" + hash + "a", "sha256:" + strings.ToUpper(hash),
		"md5:" + hash, "sha256:../" + hash[3:], "sha256:" + hash[1:] + "\n", "sha256:" + hash[1:] + "\x00"} {
		_, openErr := st.Open(t.Context(), digest)
		_, statErr := st.Stat(t.Context(), digest)
		for _, err := range []error{openErr, statErr, st.Remove(t.Context(), digest)} {
			if sandbox.ClassOf(err) != sandbox.InvalidArgument || sandbox.ReasonOf(err) != "bad_digest" {
				t.Errorf("%q: %v", digest, err)
			}
		}
	}
}

func listStops(t *testing.T, st store.Store) {
	for _, s := range []string{"1", "2", "3"} {
		Put(t, st, []byte(s))
	}
	stop, calls := errors.New("stop"), 0
	err := st.List(t.Context(), func(image.Blob) error { calls++; return stop })
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func openSurvivesRemove(t *testing.T, st store.Store) {
	b := Put(t, st, []byte("held"))
	o, err := st.Open(t.Context(), b.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if err := st.Remove(t.Context(), b.Digest); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(o); err != nil || string(got) != "held" {
		t.Errorf("read %q, %v", got, err)
	}
}

func cancelled(t *testing.T, st store.Store) {
	b := Put(t, st, []byte("x"))
	w, err := st.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, createErr := st.Create(ctx)
	_, openErr := st.Open(ctx, b.Digest)
	_, statErr := st.Stat(ctx, b.Digest)
	_, commitErr := w.Commit(ctx)
	listErr := st.List(ctx, func(image.Blob) error { return nil })
	for _, err := range []error{createErr, openErr, statErr, commitErr, listErr, st.Remove(ctx, b.Digest)} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	if err := w.Abort(); err != nil {
		t.Error(err)
	}
	if got := list(t, st); len(got) != 1 {
		t.Errorf("list: %v", got)
	}
}
