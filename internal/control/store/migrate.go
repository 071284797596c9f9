package store

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"

	"dsec/sandbox"
)

// migrations are applied in order and never edited: version n is the state after migrations[:n]. Only SQL that SQLite and
// PostgreSQL share is used, but for the types of times (integers, ms since 1970) and bytes.
var migrations = []string{
	`CREATE TABLE projects (
		path       TEXT PRIMARY KEY,
		created_ms BIGINT NOT NULL
	);
	CREATE TABLE api_keys (
		id         TEXT PRIMARY KEY,
		hash       BLOB NOT NULL UNIQUE,
		principal  TEXT NOT NULL,
		project    TEXT NOT NULL REFERENCES projects (path),
		role       TEXT NOT NULL,
		created_ms BIGINT NOT NULL,
		expires_ms BIGINT NOT NULL DEFAULT 0,
		revoked_ms BIGINT NOT NULL DEFAULT 0
	);
	CREATE INDEX api_keys_by_project ON api_keys (project, id);
	CREATE TABLE edges (
		code      TEXT PRIMARY KEY,
		address   TEXT NOT NULL,
		joined_ms BIGINT NOT NULL
	);
	CREATE TABLE manifests (
		project    TEXT NOT NULL REFERENCES projects (path),
		digest     TEXT NOT NULL,
		kind       TEXT NOT NULL,
		created_ms BIGINT NOT NULL,
		created_by TEXT NOT NULL,
		PRIMARY KEY (project, digest)
	);
	CREATE TABLE names (
		project    TEXT NOT NULL,
		kind       TEXT NOT NULL,
		name       TEXT NOT NULL,
		tag        TEXT NOT NULL,
		digest     TEXT NOT NULL,
		created_ms BIGINT NOT NULL,
		created_by TEXT NOT NULL,
		PRIMARY KEY (project, kind, name, tag),
		FOREIGN KEY (project, digest) REFERENCES manifests (project, digest)
	);
	CREATE TABLE secrets (
		name  TEXT PRIMARY KEY,
		value BLOB NOT NULL
	);`,
	// A service that is removed keeps its row, without endpoints.
	`CREATE TABLE network_services (
		name        TEXT PRIMARY KEY,
		endpoints   TEXT NOT NULL DEFAULT '',
		description TEXT NOT NULL DEFAULT '',
		changed_ms  BIGINT NOT NULL,
		changed_by  TEXT NOT NULL
	);`,
}

// migrate brings the database to the newest version in one transaction. A database from a later release is refused: an
// older program would not keep rules that it does not know.
func migrate(ctx context.Context, db *sql.DB, steps []string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin migration: %w", err)
	}
	defer tx.Rollback() // after Commit it does nothing
	if _, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)`); err != nil {
		return fmt.Errorf("create version table: %w", err)
	}
	var version int
	if err := tx.QueryRowContext(ctx, `SELECT COALESCE(MAX(version), 0) FROM schema_version`).Scan(&version); err != nil {
		return fmt.Errorf("read schema version: %w", err)
	}
	if version > len(steps) {
		return sandbox.Errorf(sandbox.FailedPrecondition, "database_newer",
			"the database has schema version %d and this program knows versions up to %d: it was written by a newer release; start that release, or give another data directory",
			version, len(steps)).WithFact("version", strconv.Itoa(version)).WithFact("known", strconv.Itoa(len(steps)))
	}
	for i, step := range steps[version:] {
		if _, err := tx.ExecContext(ctx, step); err != nil {
			return fmt.Errorf("migrate to version %d: %w", version+i+1, err)
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO schema_version (version) VALUES (?)`, version+i+1); err != nil {
			return fmt.Errorf("record version %d: %w", version+i+1, err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit migration: %w", err)
	}
	return nil
}
