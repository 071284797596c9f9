// Package store keeps what the control plane must not forget: API keys, projects, edges, the names of environments, network
// services, and the key that signs grants. Nothing per sandbox is here: that lives on the edges.
//
// Store is the contract; SQLite implements it for one apiserver, PostgreSQL will for several. Both must pass storetest.
//
// What surprises:
//
//   - Only hashes of API keys are stored. A lost key cannot be read back, only replaced.
//   - A manifest is recorded when a name first pins it, and stays recorded when the name goes. Digests that were never
//     recorded are refused at create, since a blob that merely looks like a manifest may have been uploaded as a file.
//   - A network service that is removed leaves its name behind: what a platform defines by itself, it defines once.
//   - Lists are pages by key ("after"), so rows added or removed meanwhile neither repeat nor hide others.
package store

import (
	"context"
	"crypto/sha256"
	"time"

	"dsec/sandbox"
)

// Page bounds. A size of 0 is DefaultPage; more than MaxPage is cut to it.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// A Hash is the SHA-256 of an API key as the caller sends it.
type Hash [sha256.Size]byte

// A Key is one API key's row. ID is public and names the key in lists and for revocation.
type Key struct {
	ID        string
	Hash      Hash
	Principal string
	Project   string
	Role      string
	CreatedAt time.Time
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: not revoked
}

// A Project is a node of the tree of projects; its path is "root/child/…".
type Project struct {
	Path      string
	CreatedAt time.Time
}

// An Edge is a node agent that joined. Its code is never given to another.
type Edge struct {
	Code     sandbox.EdgeCode
	Address  string
	JoinedAt time.Time
}

// A Name pins the manifest of an environment. (Project, Kind, Name, Tag) is unique.
type Name struct {
	Project   string
	Kind      string
	Name      string
	Tag       string
	Digest    string // "sha256:<hex>" of the manifest
	CreatedAt time.Time
	CreatedBy string
}

// A NameKey is where a list of names goes on.
type NameKey struct{ Kind, Name, Tag string }

// Key is n's place in lists.
func (n Name) Key() NameKey { return NameKey{n.Kind, n.Name, n.Tag} }

// A Manifest is the record that an import in this project wrote a manifest with this digest.
type Manifest struct {
	Project   string
	Digest    string
	Kind      string
	CreatedAt time.Time
	CreatedBy string
}

// A Service is a network service of the whole platform.
type Service struct {
	sandbox.Service
	ChangedAt time.Time
	ChangedBy string
}

// A Store holds rows. Every method may be called concurrently, is atomic, and has taken effect durably when it returns nil.
// Missing rows are sandbox.NotFound, taken names sandbox.AlreadyExists, and a store that cannot answer now
// sandbox.Unavailable; a cancelled context is its own error. Times have millisecond precision and are UTC.
type Store interface {
	// AddKey adds a key. Its project must exist.
	AddKey(ctx context.Context, k Key) error
	// KeyByHash finds a key, also one that is expired or revoked: the caller decides.
	KeyByHash(ctx context.Context, h Hash) (Key, error)
	// RevokeKey marks a key as revoked. The first time stays.
	RevokeKey(ctx context.Context, id string, at time.Time) error
	// Keys lists the keys of a project by id, from the first after the given id.
	Keys(ctx context.Context, project, after string, limit int) ([]Key, error)

	AddProject(ctx context.Context, p Project) error
	Project(ctx context.Context, path string) (Project, error)
	Projects(ctx context.Context, after string, limit int) ([]Project, error)

	// PutEdge adds an edge, or changes the address of the one with that code; JoinedAt stays the first.
	PutEdge(ctx context.Context, e Edge) error
	Edge(ctx context.Context, code sandbox.EdgeCode) (Edge, error)
	// Edges lists all edges by code.
	Edges(ctx context.Context) ([]Edge, error)

	// PutName records the manifest and makes the name pin it, in place of what it pinned before.
	PutName(ctx context.Context, n Name) error
	Name(ctx context.Context, project, kind, name, tag string) (Name, error)
	// Names lists names by (kind, name, tag); an empty kind means all.
	Names(ctx context.Context, project, kind string, after NameKey, limit int) ([]Name, error)
	// RemoveName removes the name; the record of its manifest stays.
	RemoveName(ctx context.Context, project, kind, name, tag string) error
	// Manifest finds the record of a manifest.
	Manifest(ctx context.Context, project, digest string) (Manifest, error)

	// PutService defines a service, in place of what its name stood for.
	PutService(ctx context.Context, s Service) error
	// AddService defines a service whose name stands for nothing.
	AddService(ctx context.Context, s Service) error
	// DefineService defines a service unless its name has ever been defined, removed since or not.
	DefineService(ctx context.Context, s Service) (defined bool, err error)
	Service(ctx context.Context, name string) (Service, error)
	// Services lists services by name.
	Services(ctx context.Context, after string, limit int) ([]Service, error)
	RemoveService(ctx context.Context, name string) error

	// Secret returns the secret of that name. If there is none yet, it stores and returns what make gives; of several
	// concurrent first calls all return the same.
	Secret(ctx context.Context, name string, make func() ([]byte, error)) ([]byte, error)

	Close() error
}

// Limit is a page size within bounds.
func Limit(n int) int {
	switch {
	case n <= 0:
		return DefaultPage
	case n > MaxPage:
		return MaxPage
	}
	return n
}
