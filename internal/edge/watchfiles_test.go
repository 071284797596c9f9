package edge

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

type eventStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s eventStream) Context() context.Context              { return s.ctx }
func (s eventStream) Send(*dsecv1.WatchFilesResponse) error { return nil }

// A watch of files that somebody forgot keeps no sandbox from its idle time-out.
func TestWatchingFilesIsNoActivity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create(idle(3 * time.Second))
		ctx, cancel := context.WithTimeout(w.user(), time.Hour)
		defer cancel()
		err := w.s.WatchFiles(&dsecv1.WatchFilesRequest{SandboxId: string(id), Path: "/watched"}, eventStream{ctx: ctx})
		if reason := sandbox.ReasonOf(grpcerr.FromStatus(err)); reason != "guest_died" || ctx.Err() != nil {
			t.Errorf("%v", err)
		}
		synctest.Wait()
		w.expect(id, stopped, sandbox.ReasonIdle)
		w.close()
	})
}
