package edge

import (
	"context"

	"dsec/sandbox"
)

// A fakeGuest's file operations are those of a sandbox that has none.

var errFakeFiles = sandbox.Errorf(sandbox.Unsupported, "not_faked", "the fake guest has no such files")

func (g *fakeGuest) StatFiles(context.Context, string, []string, bool) ([]FileStat, error) {
	return nil, errFakeFiles
}

func (g *fakeGuest) ChangeFiles(context.Context, string, []FileChange) error { return errFakeFiles }

func (g *fakeGuest) ListFiles(context.Context, string, string, int) (FileList, error) {
	return nil, errFakeFiles
}

func (g *fakeGuest) WatchFiles(ctx context.Context, path, _ string, _ bool) (FileWatch, error) {
	if path != "/watched" {
		return nil, errFakeFiles
	}
	return &fakeWatch{ctx, g}, nil
}

// A fakeWatch tells of nothing, until its guest ends.
type fakeWatch struct {
	ctx context.Context
	g   *fakeGuest
}

func (w *fakeWatch) Next() (FileEvent, error) {
	select {
	case <-w.ctx.Done():
	case <-w.g.Done():
	}
	return FileEvent{}, sandbox.Errorf(sandbox.Unavailable, "guest_died", "it has ended")
}

func (*fakeWatch) Buffered() bool { return false }
func (*fakeWatch) Close() error   { return nil }
