package client

import (
	"context"
	"iter"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

const (
	// pageSize is how many things one request lists: the most that the API gives.
	pageSize = 1000
	// undoLimit bounds the removal of what a failed call may have made.
	undoLimit = 30 * time.Second
	// silence is how long a stream that tells when nothing happens may be silent.
	silence = time.Minute
)

// A Sandbox is one sandbox, wherever it comes from. It holds no connection.
type Sandbox struct {
	ID string
	c  *Client
}

// Sandbox is the sandbox with that id. Nothing is asked of the platform.
func (c *Client) Sandbox(id string) *Sandbox { return &Sandbox{ID: id, c: c} }

// Create makes a sandbox and returns when it is ready. If ctx ends first, or it is unknown how the create ended, what may
// have been made is deleted.
func (c *Client) Create(ctx context.Context, spec *dsecv1.SandboxSpec) (*dsecv1.Sandbox, error) {
	key := NewKey()
	sb, err := c.CreateWithKey(ctx, spec, key)
	if err == nil {
		return sb, nil
	}
	switch sandbox.ClassOf(err) {
	case sandbox.Canceled, sandbox.DeadlineExceeded, sandbox.Unavailable:
		if !c.answered.Load() && ctx.Err() == nil {
			break // nobody has heard of the request
		}
		cctx, cancel := c.o.Cleanup(undoLimit)
		defer cancel()
		_, derr := invokeOnce(cctx, c, c.sandboxes.DeleteSandbox, &dsecv1.DeleteSandboxRequest{IdempotencyKey: key, Wait: true})
		if derr != nil && sandbox.ClassOf(derr) != sandbox.NotFound && c.o.Notice != nil {
			c.o.Notice("it is not known whether a sandbox was made: " + sandbox.AsError(derr).Message + "; look with `dsec ps`")
		}
	}
	return nil, err
}

// CreateWithKey makes a sandbox, or finds the one that was made with this key and this spec. What a failed call has made
// stays, to be found by the next with the key.
func (c *Client) CreateWithKey(ctx context.Context, spec *dsecv1.SandboxSpec, key string) (*dsecv1.Sandbox, error) {
	res, err := invoke(ctx, c, c.sandboxes.CreateSandbox, &dsecv1.CreateSandboxRequest{Spec: spec, IdempotencyKey: key})
	return res.GetSandbox(), err
}

// CreateMany makes count sandboxes and gives each as it becomes ready, or its failure (see FailureError). A connection that breaks is made
// again with the same key, and no index is given twice. An error is the last thing that is given: then, and when the consumer
// stops early, the sandboxes that it was not given may exist, under the keys "<key>/<index>".
func (c *Client) CreateMany(ctx context.Context, spec *dsecv1.SandboxSpec, count int, key string) iter.Seq2[*dsecv1.CreateSandboxesResponse, error] {
	if key == "" {
		key = NewKey()
	}
	req := &dsecv1.CreateSandboxesRequest{Spec: spec, Count: int32(count), IdempotencyKey: key}
	return func(yield func(*dsecv1.CreateSandboxesResponse, error) bool) {
		given := make(map[int32]bool, count)
		var o outage
		for {
			before, stopped := len(given), false
			_, err := receiveOnce(ctx, c, c.sandboxes.CreateSandboxes, req, 0, func(r *dsecv1.CreateSandboxesResponse) bool {
				if given[r.GetIndex()] {
					return true
				}
				given[r.GetIndex()] = true
				stopped = !yield(r, nil)
				return !stopped
			})
			switch {
			case stopped || err == nil && len(given) >= count:
				return
			case err == nil:
				err = sandbox.Errorf(sandbox.Unavailable, "stream_short", "the platform has answered for %d of %d sandboxes only", len(given), count)
			}
			if len(given) > before {
				o.over()
			}
			if err := c.wait(ctx, &o, err); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// List gives all sandboxes that have these labels, page by page. No states means the live ones.
func (c *Client) List(ctx context.Context, labels map[string]string, states ...dsecv1.State) iter.Seq2[*dsecv1.Sandbox, error] {
	return pages(func(token string) ([]*dsecv1.Sandbox, string, error) {
		res, err := invoke(ctx, c, c.sandboxes.ListSandboxes, &dsecv1.ListSandboxesRequest{Labels: labels, States: states, PageSize: pageSize, PageToken: token})
		return res.GetSandboxes(), res.GetNextPageToken(), err
	})
}

// pages gives what is on each page.
func pages[T any](page func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		token := ""
		for {
			all, next, err := page(token)
			if err != nil {
				var zero T
				yield(zero, err)
				return
			}
			for _, v := range all {
				if !yield(v, nil) {
					return
				}
			}
			if token = next; token == "" {
				return
			}
		}
	}
}

// Collect is all that a sequence gives, or its first error.
func Collect[T any](seq iter.Seq2[T, error]) ([]T, error) {
	var all []T
	for v, err := range seq {
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// Get is the sandbox's present state.
func (s *Sandbox) Get(ctx context.Context) (*dsecv1.Sandbox, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.GetSandbox, &dsecv1.GetSandboxRequest{Id: s.ID})
	return res.GetSandbox(), err
}

// Delete ends the sandbox, whatever it does. It returns when nothing is left of it.
func (s *Sandbox) Delete(ctx context.Context) (*dsecv1.Sandbox, error) {
	res, err := invoke(ctx, s.c, s.c.sandboxes.DeleteSandbox, &dsecv1.DeleteSandboxRequest{Id: s.ID, Wait: true})
	return res.GetSandbox(), err
}

// Watch gives what happens to sandboxes that have these labels, or have these ids: first the present state of all, then `synced`,
// then each change. With commands also the ends of their commands. When the connection breaks it begins anew, with the
// present state of all; what a consumer is given is always what is, and never what was. `alive` is not given.
func (c *Client) Watch(ctx context.Context, req *dsecv1.WatchSandboxesRequest) iter.Seq2[*dsecv1.WatchSandboxesResponse, error] {
	return func(yield func(*dsecv1.WatchSandboxesResponse, error) bool) {
		var o outage
		for {
			stopped := false
			got, err := receiveOnce(ctx, c, c.sandboxes.WatchSandboxes, req, silence, func(r *dsecv1.WatchSandboxesResponse) bool {
				if _, alive := r.GetEvent().(*dsecv1.WatchSandboxesResponse_Alive); !alive {
					stopped = !yield(r, nil)
				}
				return !stopped
			})
			if stopped {
				return
			}
			if got {
				o.over()
			}
			if err == nil {
				err = sandbox.Errorf(sandbox.Unavailable, "stream_ended", "the platform has ended the stream of changes")
			}
			if err := c.wait(ctx, &o, err); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// Info is the platform's version, the caller and the nodes. It is asked once.
func (c *Client) Info(ctx context.Context) (*dsecv1.GetInfoResponse, error) {
	return invokeOnce(ctx, c, c.system.GetInfo, &dsecv1.GetInfoRequest{})
}
