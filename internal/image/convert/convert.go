// Package convert makes environments: it turns a tar archive, in one pass, into a layer and its manifest in the store, and
// reads them back.
//
// # What an archive may do
//
// Archives come from anybody. What cannot be meant well is refused, and then nothing of it is in the store: "..", NUL,
// entries below something that is no directory, hard links to nothing, archives that end early or hold more than the
// limits. What has no place in a layer is dropped and listed in Manifest.Dropped: device nodes, except the overlay's
// whiteouts (character device 0:0), and extended attributes by this table:
//
//	user.*                           kept on files and directories
//	security.capability              kept
//	system.posix_acl_{access,default} kept if well formed
//	trusted.overlay.opaque = y       kept: it hides a directory below, as a whiteout could
//	other trusted.*                  dropped: overlayfs follows redirect and metacopy wherever they point to
//	other security.*                 dropped: labels belong to the policy of a host
//
// # What surprises
//
//   - A leading "/" and "./" are stripped; "." sets the root's own attributes. Missing parents are root's, 0755, of 1970.
//   - A later entry replaces an earlier one of the same path, a directory only if the later is none. The earlier one's
//     content stays in the blob, unused.
//   - Owners are kept as they are. A sandbox has ids 0 to 65535; files of others appear as nobody's in it.
//   - Zeros become holes (see erofs.Data), also where the archive spells them out.
//   - An archive without its end marker counts as cut, since nothing else tells them apart.
//   - A failure between the commits of the three blobs leaves the earlier ones, unreferenced: removing them could take
//     them from a concurrent import of the same content.
package convert

import (
	"context"
	"errors"
	"fmt"
	"io"

	"dsec/internal/image"
	"dsec/internal/image/erofs"
	"dsec/internal/image/store"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// Defaults of Options.
const (
	DefaultMaxEntries = 10_000_000
	DefaultMaxBytes   = 1 << 40
	DefaultMaxMemory  = 4 << 30
)

// Options say what an import makes and how much it may take.
type Options struct {
	Kind   string
	Config image.Config
	// Whiteouts says that the archive is a layer in OCI form: .wh.NAME hides NAME of the layers below, .wh..wh..opq all
	// that its directory has there. Without it these are ordinary files.
	Whiteouts  bool
	MaxEntries int64 // names, including parents that the archive left out; 0 = DefaultMaxEntries
	MaxBytes   int64 // bytes of files, holes included; 0 = DefaultMaxBytes
	MaxMemory  int64 // bytes that the tree may take while it is built; 0 = DefaultMaxMemory
	// Progress, if set, is called from time to time, and once at the end, with what was read so far.
	Progress func(entries, bytes int64)
}

func (o Options) withDefaults() Options {
	set := func(p *int64, d, most int64) {
		if *p == 0 {
			*p = d
		}
		*p = min(*p, most) // sums of limits do not overflow
	}
	set(&o.MaxEntries, DefaultMaxEntries, 1<<31)
	set(&o.MaxBytes, DefaultMaxBytes, 1<<60)
	set(&o.MaxMemory, DefaultMaxMemory, 1<<60)
	if o.Progress == nil {
		o.Progress = func(int64, int64) {}
	}
	return o
}

func (o Options) validate() error {
	if !image.ValidKind(o.Kind) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_kind", "%.64q is no kind of environment: base, workspace or toolkit", o.Kind)
	}
	return o.Config.Validate()
}

// Import reads a tar archive, plain or gzip, to its end and publishes a layer and a manifest, whose blob is returned. An
// archive that it refuses is InvalidArgument: "bad_archive" (damaged, cut, or no tar), "bad_entry" (with the fact "path"),
// "too_many_entries", "too_many_bytes", "archive_too_large". A source that fails is Canceled "upload_cut".
func Import(ctx context.Context, st store.Store, r io.Reader, o Options) (image.Manifest, image.Blob, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil { // before anything is read
		return image.Manifest{}, image.Blob{}, err
	}
	data, err := st.Create(ctx)
	if err != nil {
		return image.Manifest{}, image.Blob{}, err
	}
	defer data.Abort()
	im := &importer{
		o: o, in: newInput(ctx, r), root: erofs.NewDir(0o755), data: erofs.NewData(data, 1),
		manifest: image.Manifest{Version: image.ManifestVersion, Kind: o.Kind, Config: o.Config},
	}
	if err := im.readArchive(); err != nil {
		return image.Manifest{}, image.Blob{}, im.classify(err)
	}
	im.count()
	o.Progress(im.entries, im.bytes)
	return im.publish(ctx, st, data)
}

// publish writes metadata and manifest, and only then commits: data first, the manifest last.
func (im *importer) publish(ctx context.Context, st store.Store, data store.Writer) (m image.Manifest, b image.Blob, err error) {
	var layer image.Layer
	var devices []erofs.Device
	if blocks := im.data.Blocks(); blocks > 0 {
		blob, err := data.Sum()
		if err != nil {
			return m, b, err
		}
		layer.Data = []image.Blob{blob}
		devices = []erofs.Device{{Digest: blob.Digest[len(image.DigestPrefix):], Blocks: blocks}}
	}
	metadata, err := st.Create(ctx)
	if err != nil {
		return m, b, err
	}
	defer metadata.Abort()
	if err := erofs.Write(metadata, im.root, devices); err != nil {
		return m, b, fmt.Errorf("write layer: %w", err)
	}
	if layer.Metadata, err = metadata.Sum(); err != nil {
		return m, b, err
	}
	im.manifest.Layers = []image.Layer{layer}
	encoded, err := im.manifest.Encode()
	if err != nil {
		return m, b, err
	}
	manifest, err := st.Create(ctx)
	if err != nil {
		return m, b, err
	}
	defer manifest.Abort()
	if _, err := manifest.Write(encoded); err != nil {
		return m, b, err
	}
	if len(layer.Data) > 0 {
		if _, err := data.Commit(ctx); err != nil {
			return m, b, err
		}
	}
	if _, err := metadata.Commit(ctx); err != nil {
		return m, b, err
	}
	b, err = manifest.Commit(ctx)
	return im.manifest, b, err
}

// LoadManifest reads and checks a manifest. That it is not there is NotFound "blob_not_found".
func LoadManifest(ctx context.Context, st store.Store, digest string) (image.Manifest, error) {
	b, err := store.ReadAll(ctx, st, digest, image.MaxManifest)
	if err != nil {
		return image.Manifest{}, err
	}
	return image.DecodeManifest(b)
}

// Sources names the files of a manifest's layers for mounting, lowest first.
func Sources(st *store.Posix, m image.Manifest) []rootfs.Source {
	file := func(b image.Blob) rootfs.File {
		return rootfs.File{Path: st.Path(b.Digest), Digest: b.Digest, Size: b.Size}
	}
	var sources []rootfs.Source
	for _, l := range m.Layers {
		s := rootfs.Source{Metadata: file(l.Metadata)}
		for _, b := range l.Data {
			s.Data = append(s.Data, file(b))
		}
		sources = append(sources, s)
	}
	return sources
}

// An Entry is one name of a layer.
type Entry struct {
	Path   string // starts with "/"
	Target string // of a symbolic link
	erofs.Info
}

// Walk visits every name of a layer, directories before their contents, sorted within each. The metadata is verified
// first; one that is damaged is DataLoss "blob_corrupt". fn may return fs.SkipDir for a directory.
func Walk(ctx context.Context, st store.Store, l image.Layer, fn func(Entry) error) error {
	if err := store.Verify(ctx, st, l.Metadata.Digest); err != nil {
		return err
	}
	o, err := st.Open(ctx, l.Metadata.Digest)
	if err != nil {
		return err
	}
	defer o.Close()
	im, err := erofs.Open(o, o.Size())
	if err != nil {
		return damaged(err)
	}
	return damaged(im.Walk(func(path string, i erofs.Info) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		e := Entry{Path: path, Info: i}
		if i.Type() == erofs.TypeSymlink {
			if e.Target, err = im.Readlink(i); err != nil {
				return err
			}
		}
		return fn(e)
	}))
}

func damaged(err error) error {
	if errors.Is(err, erofs.ErrFormat) {
		return sandbox.Errorf(sandbox.DataLoss, "blob_corrupt", "the layer's metadata is damaged; create the environment again").WithCause(err)
	}
	return err
}
