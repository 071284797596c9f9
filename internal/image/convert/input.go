package convert

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"io"

	"dsec/sandbox"
)

const (
	tarBlock = 512
	// headerAllowance is what an archive may spend on headers and padding beyond perEntryAllowance for each entry that its
	// limit allows, and trailerAllowance what may follow its end marker.
	headerAllowance   = 64 << 20
	perEntryAllowance = 4 << 10
	trailerAllowance  = 16 << 20
)

// input is the archive's bytes, decompressed, counted and bounded. It remembers the source's own failure, so that it can be
// told from a damaged archive whatever the decoders make of it.
type input struct {
	r      io.Reader
	source *source
	gzip   bool

	count int64 // bytes that were delivered
	limit int64 // bytes that may be
	last  [tarBlock]byte
}

var errInputLimit = sandbox.Errorf(sandbox.InvalidArgument, "archive_too_large",
	"the archive has more bytes of headers, padding or trailing data than its entries can need")

// newInput detects gzip by its magic number.
func newInput(ctx context.Context, r io.Reader) *input {
	in := &input{source: &source{ctx: ctx, r: r}}
	buffered := bufio.NewReaderSize(in.source, 256<<10)
	in.r = buffered
	if magic, _ := buffered.Peek(2); len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b {
		in.gzip = true
		in.r = &lazyGzip{r: buffered}
	}
	return in
}

func (in *input) Read(p []byte) (int, error) {
	if in.count >= in.limit {
		return 0, errInputLimit
	}
	p = p[:min(int64(len(p)), in.limit-in.count)]
	n, err := in.r.Read(p)
	in.count += int64(n)
	if n >= tarBlock {
		copy(in.last[:], p[n-tarBlock:n])
	} else {
		copy(in.last[:], in.last[n:])
		copy(in.last[tarBlock-n:], p[:n])
	}
	return n, err
}

// drain reads what follows the end marker, so that a damaged gzip trailer is seen and a client can finish sending.
func (in *input) drain() error {
	in.limit = in.count + trailerAllowance
	_, err := io.Copy(io.Discard, in)
	return err
}

// source stops when its context does. It keeps the context for the length of one Import only.
type source struct {
	ctx context.Context
	r   io.Reader
	err error // what the source said, other than that it has ended
}

func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		s.err = err
		return 0, err
	}
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// lazyGzip reports a bad gzip header on the first read.
type lazyGzip struct {
	r io.Reader
	z *gzip.Reader
}

func (l *lazyGzip) Read(p []byte) (int, error) {
	if l.z == nil {
		z, err := gzip.NewReader(l.r)
		if err != nil {
			return 0, err
		}
		l.z = z
	}
	return l.z.Read(p)
}
