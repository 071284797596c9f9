// Package image is what environments are made of: manifests that pin layers by digest, and the store that holds them.
//
// A layer is one EROFS metadata file and up to 16 immutable data blobs (EROFS extra devices). File contents are in the
// blobs, cut into chunks that are aligned to BlockSize; everything else is in the metadata file. Both are named by the
// SHA-256 of their bytes. Today the converter writes one blob per layer, or none if no file has content; deduplication
// will let a layer refer to blobs of others without any change of the form.
package image

import (
	"time"

	"dsec/sandbox"
)

// Bounds of a layer.
const (
	BlockSize = 4096
	MaxBlobs  = 16
)

// Kinds of environments.
const (
	KindBase      = "base"
	KindWorkspace = "workspace"
	KindToolkit   = "toolkit"
)

// A Blob is an immutable object of the store.
type Blob struct {
	Digest string `json:"digest"` // "sha256:<hex>"
	Size   int64  `json:"size"`
}

// A Layer is one EROFS file system: metadata, and data blobs in the order of its device table.
type Layer struct {
	Metadata Blob   `json:"metadata"`
	Data     []Blob `json:"data"`
}

// A Manifest says what an environment is. Its canonical JSON is itself an object of the store, and its digest is what a
// name pins.
type Manifest struct {
	Version   int      `json:"version"` // 1
	Kind      string   `json:"kind"`
	Layers    []Layer  `json:"layers"` // lowest first
	Config    Config   `json:"config"`
	Entries   int64    `json:"entries"`
	FileBytes int64    `json:"file_bytes"`
	Dropped   []string `json:"dropped,omitempty"` // what the importer left out, at most MaxDropped entries
}

// Config is what an image says of the commands that run in it.
type Config struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
}

// MaxDropped bounds Manifest.Dropped.
const MaxDropped = 100

// A Name is a row that pins a manifest's digest.
type Name struct {
	Kind      string
	Ref       sandbox.EnvRef // by tag
	Digest    string
	CreatedAt time.Time
	CreatedBy string
}
