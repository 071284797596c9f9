package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"dsec/client"
	"dsec/internal/image/archive"
)

// packDirectory packs a directory while it is sent.
func packDirectory(ctx context.Context, c *console, dir string, o archive.Options) *archiveSource {
	skipped, example := 0, ""
	o.Skipped = func(path, why string) {
		if skipped++; skipped == 1 {
			example = path + " (" + why + ")"
		}
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := archive.WriteTar(ctx, w, dir, o)
		w.CloseWithError(err) // nil is the end of the archive
		done <- err
	}()
	return &archiveSource{Reader: r, size: -1, close: func() error {
		r.CloseWithError(client.ErrNotWanted)
		err := <-done
		if skipped > 0 {
			c.say("%d entries of %s could not be packed, for example %s", skipped, dir, example)
		}
		if err != nil && !errors.Is(err, client.ErrNotWanted) {
			return fmt.Errorf("packing %s: %w", dir, err)
		}
		return nil
	}}
}
