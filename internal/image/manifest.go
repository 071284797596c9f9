package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"dsec/sandbox"
)

// Bounds of a manifest.
const (
	ManifestVersion = 1
	MaxManifest     = 4 << 20 // bytes of its JSON
	MaxLayers       = 64
	maxDroppedLen   = 300
)

// DigestPrefix starts every digest; 64 lower-case hex digits follow.
const DigestPrefix = "sha256:"

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ValidDigest reports whether s has the form of a digest, and so may become a part of a path.
func ValidDigest(s string) bool { return digestForm.MatchString(s) }

// ValidKind reports whether s is a kind of environment.
func ValidKind(s string) bool { return s == KindBase || s == KindWorkspace || s == KindToolkit }

// Encode is the manifest's canonical form: equal manifests have equal bytes.
func (m Manifest) Encode() ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	if len(b) > MaxManifest {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_manifest", "manifest of %d bytes; at most %d", len(b), MaxManifest)
	}
	return b, nil
}

// DecodeManifest reads what Encode wrote, and nothing else: DataLoss "invalid_manifest" for anything that is not exactly
// a manifest of ours, Unsupported "manifest_version" for one of a later version.
func DecodeManifest(b []byte) (Manifest, error) {
	damaged := func(err error) (Manifest, error) {
		return Manifest{}, sandbox.Errorf(sandbox.DataLoss, "invalid_manifest", "the manifest is damaged; create the environment again").WithCause(err)
	}
	if len(b) > MaxManifest {
		return damaged(fmt.Errorf("%d bytes", len(b)))
	}
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return damaged(err)
	}
	if v.Version > ManifestVersion {
		return Manifest{}, sandbox.Errorf(sandbox.Unsupported, "manifest_version",
			"the manifest has version %d, this release reads version %d; update dsec", v.Version, ManifestVersion)
	}
	var m Manifest
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return damaged(err)
	}
	if _, err := d.Token(); err != io.EOF {
		return damaged(fmt.Errorf("bytes after the manifest"))
	}
	again, err := m.Encode()
	if err != nil {
		return damaged(err)
	}
	if !bytes.Equal(again, b) {
		return damaged(fmt.Errorf("not in canonical form"))
	}
	return m, nil
}

// Validate checks everything that does not need the store.
func (m Manifest) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_manifest", format, args...)
	}
	switch {
	case m.Version != ManifestVersion:
		return bad("manifest of version %d", m.Version)
	case !ValidKind(m.Kind):
		return bad("%.64q is no kind of environment: base, workspace or toolkit", m.Kind)
	case len(m.Layers) == 0 || len(m.Layers) > MaxLayers:
		return bad("%d layers; there must be between 1 and %d", len(m.Layers), MaxLayers)
	case m.Entries < 0 || m.FileBytes < 0:
		return bad("negative counts")
	case len(m.Dropped) > MaxDropped:
		return bad("%d dropped entries; at most %d", len(m.Dropped), MaxDropped)
	}
	for _, d := range m.Dropped {
		if !utf8.ValidString(d) {
			return bad("a dropped entry is not valid UTF-8")
		}
	}
	for _, l := range m.Layers {
		if len(l.Data) > MaxBlobs {
			return bad("a layer with %d data blobs; at most %d", len(l.Data), MaxBlobs)
		}
		for _, b := range append([]Blob{l.Metadata}, l.Data...) {
			if !ValidDigest(b.Digest) || b.Size <= 0 || b.Size%BlockSize != 0 {
				return bad("blob %.80q of %d bytes is no part of a layer", b.Digest, b.Size)
			}
		}
	}
	return m.Config.Validate()
}

// Validate checks what an image says of its commands; what of it exists in the image is seen when a command starts.
func (c Config) Validate() error {
	if err := (sandbox.Command{Argv: []string{"true"}, Cwd: c.Workdir, User: c.User, Env: c.Env}).Validate(); err != nil {
		return err
	}
	for k, v := range c.Env {
		if !utf8.ValidString(v) {
			return sandbox.Errorf(sandbox.InvalidArgument, "invalid_env", "environment variable %s is not valid UTF-8", k)
		}
	}
	if !utf8.ValidString(c.Workdir) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_manifest", "the working directory is not valid UTF-8")
	}
	return nil
}

// Drop notes something that the importer left out, while there is room. The text becomes valid UTF-8, so that the
// canonical form survives a round trip.
func (m *Manifest) Drop(what string) {
	if len(m.Dropped) >= MaxDropped {
		return
	}
	if len(what) > maxDroppedLen {
		what = what[:maxDroppedLen] + "…"
	}
	m.Dropped = append(m.Dropped, strings.ToValidUTF8(what, "\uFFFD"))
}
