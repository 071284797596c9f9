package edgeclient

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/sandbox"
)

// Bounds of a batch. A message of 3 MiB passes every default of gRPC.
const (
	maxBatch      = 64
	maxBatchBytes = 3 << 20
	maxBatchDelay = 2 * time.Millisecond
	// batchGrace is added to the latest deadline in a batch: the edge fails a create at its deadline and says so.
	batchGrace = 10 * time.Second
)

// A waiting create gets one answer.
type waiting struct {
	req    *edgev1.CreateSandbox
	size   int
	answer chan answer // capacity 1
	batch  *batch      // set when it is sent; guarded by batcher.mu
}

type answer struct {
	result *edgev1.CreateResult
	err    error
}

// A batch is one call. When all of its callers have given up, the call is cancelled.
type batch struct {
	creates []*waiting
	left    atomic.Int32
	cancel  context.CancelFunc
}

// A batcher collects creates: a batch goes out when it is full, after maxBatchDelay, or at once while none is in flight, so
// that a single caller never waits.
type batcher struct {
	send func(context.Context, *batch)

	mu       sync.Mutex
	pending  []*waiting
	bytes    int
	timer    *time.Timer
	inFlight int
	closed   bool

	running sync.WaitGroup
	ctx     context.Context
	end     context.CancelFunc
}

func (b *batcher) init(send func(context.Context, *batch)) {
	b.send = send
	b.ctx, b.end = context.WithCancel(context.Background())
}

func (b *batcher) close() {
	b.mu.Lock()
	b.closed = true
	pending := b.pending
	b.pending, b.bytes = nil, 0
	if b.timer != nil {
		b.timer.Stop()
	}
	b.mu.Unlock()
	b.end()
	for _, w := range pending {
		w.answer <- answer{err: errClosed}
	}
	b.running.Wait()
}

var errClosed = sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the control plane is shutting down; try again")

func (b *batcher) add(w *waiting) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	if len(b.pending) > 0 && b.bytes+w.size > maxBatchBytes {
		b.flushLocked()
	}
	b.pending = append(b.pending, w)
	b.bytes += w.size
	switch {
	case len(b.pending) >= maxBatch || b.inFlight == 0:
		b.flushLocked()
	case len(b.pending) == 1:
		b.timer = time.AfterFunc(maxBatchDelay, b.flush)
	}
	return nil
}

func (b *batcher) flush() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flushLocked()
}

func (b *batcher) flushLocked() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	if len(b.pending) == 0 || b.closed {
		return
	}
	ctx, cancel := context.WithDeadline(b.ctx, latest(b.pending).Add(batchGrace))
	bt := &batch{creates: b.pending, cancel: cancel}
	bt.left.Store(int32(len(bt.creates)))
	for _, w := range bt.creates {
		w.batch = bt
	}
	b.pending, b.bytes = nil, 0
	b.inFlight++
	b.running.Go(func() {
		defer cancel()
		b.send(ctx, bt)
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.inFlight--; b.inFlight == 0 {
			b.flushLocked()
		}
	})
}

func latest(list []*waiting) time.Time {
	var t time.Time
	for _, w := range list {
		if d := w.req.GetDeadline().AsTime(); d.After(t) {
			t = d
		}
	}
	return t
}

// abandon takes a create out of what is pending, or leaves its batch. It reports whether it was never sent.
func (b *batcher) abandon(w *waiting) (unsent bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.batch != nil {
		if w.batch.left.Add(-1) == 0 {
			w.batch.cancel()
		}
		return false
	}
	for i, p := range b.pending {
		if p == w {
			b.pending = append(b.pending[:i:i], b.pending[i+1:]...)
			b.bytes -= w.size
			return true
		}
	}
	return true
}

// Create asks the edge to create one sandbox and waits for the result. A result with a failure is no error. If sent is
// false the edge has never heard of it; if it is true and there is an error, the sandbox may exist.
func (c *Client) Create(ctx context.Context, r *edgev1.CreateSandbox) (result *edgev1.CreateResult, sent bool, err error) {
	if err := c.ready(ctx); err != nil {
		return nil, false, err
	}
	w := &waiting{req: r, size: proto.Size(r), answer: make(chan answer, 1)}
	if err := c.batches.add(w); err != nil {
		return nil, false, err
	}
	select {
	case a := <-w.answer:
		return a.result, true, a.err
	case <-ctx.Done():
		unsent := c.batches.abandon(w)
		return nil, !unsent, sandbox.AsError(ctx.Err())
	}
}

// sendBatch makes the call and hands out its results as they come.
func (c *Client) sendBatch(ctx context.Context, b *batch) {
	open := make(map[string]*waiting, len(b.creates))
	msg := &edgev1.CreateSandboxesRequest{Creates: make([]*edgev1.CreateSandbox, len(b.creates))}
	for i, w := range b.creates {
		open[w.req.GetId()], msg.Creates[i] = w, w.req
	}
	// The grants that count are in the creates; the one in the metadata only says that an apiserver calls.
	ctx = metadata.NewOutgoingContext(ctx, metadata.MD{grant.MetadataKey: {b.creates[0].req.GetGrant()}})
	err := c.receive(ctx, msg, open)
	for _, w := range open {
		w.answer <- answer{err: err}
	}
}

// receive deletes from open what it has answered. It returns why the rest gets no result.
func (c *Client) receive(ctx context.Context, msg *edgev1.CreateSandboxesRequest, open map[string]*waiting) error {
	stream, err := c.rpc.CreateSandboxes(ctx, msg)
	if err != nil {
		return failure(ctx, err)
	}
	for {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return sandbox.Errorf(sandbox.Internal, "no_result", "node %s ended a batch of creates without a result for each", c.o.Code)
		case err != nil:
			return failure(ctx, err)
		}
		if w := open[r.GetId()]; w != nil { // an id we did not ask for is the edge's mistake and nobody's result
			delete(open, r.GetId())
			w.answer <- answer{result: r}
		}
	}
}
