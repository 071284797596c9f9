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

func (g *fakeGuest) WatchFiles(context.Context, string, string, bool) (FileWatch, error) {
	return nil, errFakeFiles
}
