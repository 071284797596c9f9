package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"dsec/sandbox"
)

var (
	keyColumns      = columns("id", "hash", "principal", "project", "role", "created_ms", "expires_ms", "revoked_ms")
	nameColumns     = columns("project", "kind", "name", "tag", "digest", "created_ms", "created_by")
	manifestColumns = columns("project", "digest", "kind", "created_ms", "created_by")
)

func scanKey(s scanner) (Key, error) {
	var k Key
	var hash []byte
	var created, expires, revoked int64
	if err := s.Scan(&k.ID, &hash, &k.Principal, &k.Project, &k.Role, &created, &expires, &revoked); err != nil {
		return Key{}, err
	}
	if copy(k.Hash[:], hash) != len(k.Hash) {
		return Key{}, fmt.Errorf("key %s has a hash of %d bytes", k.ID, len(hash))
	}
	k.CreatedAt, k.ExpiresAt, k.RevokedAt = fromMillis(created), fromMillis(expires), fromMillis(revoked)
	return k, nil
}

// AddKey implements Store.
func (s *SQLite) AddKey(ctx context.Context, k Key) error {
	n, err := s.exec(ctx, "add key", `INSERT INTO api_keys (`+keyColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		k.ID, k.Hash[:], k.Principal, k.Project, k.Role, millis(k.CreatedAt), millis(k.ExpiresAt), millis(k.RevokedAt))
	if err == nil && n == 0 {
		return sandbox.Errorf(sandbox.AlreadyExists, "key_exists", "an API key with id %q or the same secret exists", k.ID)
	}
	return err
}

// KeyByHash implements Store.
func (s *SQLite) KeyByHash(ctx context.Context, h Hash) (Key, error) {
	row := s.read.QueryRowContext(ctx, `SELECT `+keyColumns+` FROM api_keys WHERE hash = ?`, h[:])
	return one(ctx, "find key", row, scanKey, notFound("key_not_found", "there is no such API key"))
}

// RevokeKey implements Store.
func (s *SQLite) RevokeKey(ctx context.Context, id string, at time.Time) error {
	n, err := s.exec(ctx, "revoke key",
		`UPDATE api_keys SET revoked_ms = CASE revoked_ms WHEN 0 THEN ? ELSE revoked_ms END WHERE id = ?`, millis(at), id)
	if err == nil && n == 0 {
		return notFound("key_not_found", "there is no API key with id %q", id)
	}
	return err
}

// Keys implements Store.
func (s *SQLite) Keys(ctx context.Context, project, after string, limit int) ([]Key, error) {
	return many(ctx, s.read, "list keys", scanKey,
		`SELECT `+keyColumns+` FROM api_keys WHERE project = ? AND id > ? ORDER BY id LIMIT ?`, project, after, Limit(limit))
}

func scanProject(s scanner) (Project, error) {
	var p Project
	var created int64
	err := s.Scan(&p.Path, &created)
	p.CreatedAt = fromMillis(created)
	return p, err
}

// AddProject implements Store.
func (s *SQLite) AddProject(ctx context.Context, p Project) error {
	n, err := s.exec(ctx, "add project", `INSERT INTO projects (path, created_ms) VALUES (?, ?) ON CONFLICT DO NOTHING`, p.Path, millis(p.CreatedAt))
	if err == nil && n == 0 {
		return sandbox.Errorf(sandbox.AlreadyExists, "project_exists", "project %q exists", p.Path)
	}
	return err
}

// Project implements Store.
func (s *SQLite) Project(ctx context.Context, path string) (Project, error) {
	row := s.read.QueryRowContext(ctx, `SELECT path, created_ms FROM projects WHERE path = ?`, path)
	return one(ctx, "find project", row, scanProject, notFound("project_not_found", "there is no project %q", path))
}

// Projects implements Store.
func (s *SQLite) Projects(ctx context.Context, after string, limit int) ([]Project, error) {
	return many(ctx, s.read, "list projects", scanProject,
		`SELECT path, created_ms FROM projects WHERE path > ? ORDER BY path LIMIT ?`, after, Limit(limit))
}

func scanEdge(s scanner) (Edge, error) {
	var e Edge
	var joined int64
	err := s.Scan(&e.Code, &e.Address, &joined)
	e.JoinedAt = fromMillis(joined)
	return e, err
}

// PutEdge implements Store.
func (s *SQLite) PutEdge(ctx context.Context, e Edge) error {
	_, err := s.exec(ctx, "put edge",
		`INSERT INTO edges (code, address, joined_ms) VALUES (?, ?, ?) ON CONFLICT (code) DO UPDATE SET address = excluded.address`,
		string(e.Code), e.Address, millis(e.JoinedAt))
	return err
}

// Edge implements Store.
func (s *SQLite) Edge(ctx context.Context, code sandbox.EdgeCode) (Edge, error) {
	row := s.read.QueryRowContext(ctx, `SELECT code, address, joined_ms FROM edges WHERE code = ?`, string(code))
	return one(ctx, "find edge", row, scanEdge, notFound("edge_not_found", "there is no edge %q", code))
}

// Edges implements Store.
func (s *SQLite) Edges(ctx context.Context) ([]Edge, error) {
	return many(ctx, s.read, "list edges", scanEdge, `SELECT code, address, joined_ms FROM edges ORDER BY code`)
}

func scanName(s scanner) (Name, error) {
	var n Name
	var created int64
	err := s.Scan(&n.Project, &n.Kind, &n.Name, &n.Tag, &n.Digest, &created, &n.CreatedBy)
	n.CreatedAt = fromMillis(created)
	return n, err
}

// PutName implements Store.
func (s *SQLite) PutName(ctx context.Context, n Name) error {
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return failure(ctx, "put name", err)
	}
	defer tx.Rollback() // after Commit it does nothing
	if _, err := tx.ExecContext(ctx, `INSERT INTO manifests (`+manifestColumns+`) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		n.Project, n.Digest, n.Kind, millis(n.CreatedAt), n.CreatedBy); err != nil {
		return failure(ctx, "record manifest", err)
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO names (`+nameColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (project, kind, name, tag) DO UPDATE SET
		digest = excluded.digest, created_ms = excluded.created_ms, created_by = excluded.created_by`,
		n.Project, n.Kind, n.Name, n.Tag, n.Digest, millis(n.CreatedAt), n.CreatedBy); err != nil {
		return failure(ctx, "put name", err)
	}
	if err := tx.Commit(); err != nil {
		return failure(ctx, "put name", err)
	}
	return nil
}

func missingName(kind, name, tag string) error {
	return notFound("environment_not_found", "there is no %s %s:%s", kind, name, tag)
}

// Name implements Store.
func (s *SQLite) Name(ctx context.Context, project, kind, name, tag string) (Name, error) {
	row := s.read.QueryRowContext(ctx, `SELECT `+nameColumns+` FROM names WHERE project = ? AND kind = ? AND name = ? AND tag = ?`,
		project, kind, name, tag)
	return one(ctx, "find name", row, scanName, missingName(kind, name, tag))
}

// Names implements Store.
func (s *SQLite) Names(ctx context.Context, project, kind string, after NameKey, limit int) ([]Name, error) {
	return many(ctx, s.read, "list names", scanName,
		`SELECT `+nameColumns+` FROM names WHERE project = ? AND (? = '' OR kind = ?) AND (kind, name, tag) > (?, ?, ?)
		ORDER BY kind, name, tag LIMIT ?`, project, kind, kind, after.Kind, after.Name, after.Tag, Limit(limit))
}

// RemoveName implements Store.
func (s *SQLite) RemoveName(ctx context.Context, project, kind, name, tag string) error {
	n, err := s.exec(ctx, "remove name", `DELETE FROM names WHERE project = ? AND kind = ? AND name = ? AND tag = ?`, project, kind, name, tag)
	if err == nil && n == 0 {
		return missingName(kind, name, tag)
	}
	return err
}

// Manifest implements Store.
func (s *SQLite) Manifest(ctx context.Context, project, digest string) (Manifest, error) {
	row := s.read.QueryRowContext(ctx, `SELECT `+manifestColumns+` FROM manifests WHERE project = ? AND digest = ?`, project, digest)
	scan := func(s scanner) (Manifest, error) {
		var m Manifest
		var created int64
		err := s.Scan(&m.Project, &m.Digest, &m.Kind, &created, &m.CreatedBy)
		m.CreatedAt = fromMillis(created)
		return m, err
	}
	return one(ctx, "find manifest", row, scan, notFound("environment_not_found", "there is no environment %s", digest))
}

// Secret implements Store.
func (s *SQLite) Secret(ctx context.Context, name string, make func() ([]byte, error)) ([]byte, error) {
	const query = `SELECT value FROM secrets WHERE name = ?`
	var value []byte
	err := s.read.QueryRowContext(ctx, query, name).Scan(&value)
	switch {
	case err == nil:
		return value, nil
	case !errors.Is(err, sql.ErrNoRows):
		return nil, failure(ctx, "read secret", err)
	}
	fresh, err := make()
	if err != nil {
		return nil, fmt.Errorf("make secret %s: %w", name, err)
	}
	if _, err := s.exec(ctx, "add secret", `INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING`, name, fresh); err != nil {
		return nil, err
	}
	// Another call may have been first: what is stored counts.
	if err := s.write.QueryRowContext(ctx, query, name).Scan(&value); err != nil {
		return nil, failure(ctx, "read secret", err)
	}
	return value, nil
}
