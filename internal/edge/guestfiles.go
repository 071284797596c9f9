package edge

import (
	"context"

	"dsec/internal/edge/guest"
)

// GuestFiles are the operations on files but reading and writing.
type GuestFiles interface {
	// StatFiles tells about each path by itself; ChangeFiles makes changes in order, up to the first that fails.
	StatFiles(ctx context.Context, user string, paths []string, follow bool) ([]FileStat, error)
	ChangeFiles(ctx context.Context, user string, changes []FileChange) error
	// ListFiles and WatchFiles end with ctx.
	ListFiles(ctx context.Context, path, user string, depth int) (FileList, error)
	WatchFiles(ctx context.Context, path, user string, recursive bool) (FileWatch, error)
}

type (
	// A FileList gives the entries of a directory; io.EOF is its end, and nothing else is.
	FileList interface {
		Next() (FileEntry, error)
		Close() error
	}
	// A FileWatch gives events. Buffered says whether there is one at once.
	FileWatch interface {
		Next() (FileEvent, error)
		Buffered() bool
		Close() error
	}
)

// Plain data of the guest's client.
type (
	FileEntry  = guest.FileEntry
	FileStat   = guest.FileStat
	FileChange = guest.Change
	FileEvent  = guest.FileEvent
)

func (g guestClient) ListFiles(ctx context.Context, path, user string, depth int) (FileList, error) {
	l, err := g.Client.ListFiles(ctx, path, user, depth)
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (g guestClient) WatchFiles(ctx context.Context, path, user string, recursive bool) (FileWatch, error) {
	w, err := g.Client.WatchFiles(ctx, path, user, recursive)
	if err != nil {
		return nil, err
	}
	return w, nil
}

func (p *reconnecting) StatFiles(ctx context.Context, user string, paths []string, follow bool) ([]FileStat, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.StatFiles(ctx, user, paths, follow)
}

func (p *reconnecting) ChangeFiles(ctx context.Context, user string, changes []FileChange) error {
	g, err := p.await(ctx)
	if err != nil {
		return err
	}
	return g.ChangeFiles(ctx, user, changes)
}

func (p *reconnecting) ListFiles(ctx context.Context, path, user string, depth int) (FileList, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.ListFiles(ctx, path, user, depth)
}

func (p *reconnecting) WatchFiles(ctx context.Context, path, user string, recursive bool) (FileWatch, error) {
	g, err := p.await(ctx)
	if err != nil {
		return nil, err
	}
	return g.WatchFiles(ctx, path, user, recursive)
}
