package control

import (
	"context"
	"io"

	"dsec/internal/control/apiserver"
	"dsec/internal/image"
	"dsec/internal/image/convert"
	imagestore "dsec/internal/image/store"
)

// Images keeps environments in a blob store.
type Images struct{ Store imagestore.Store }

var _ apiserver.Images = Images{}

// Import implements apiserver.Images.
func (i Images) Import(ctx context.Context, kind string, archive io.Reader, config image.Config) (string, image.Manifest, error) {
	m, b, err := convert.Import(ctx, i.Store, archive, convert.Options{Kind: kind, Config: config})
	return b.Digest, m, err
}

// Manifest implements apiserver.Images.
func (i Images) Manifest(ctx context.Context, digest string) (image.Manifest, error) {
	return convert.LoadManifest(ctx, i.Store, digest)
}
