package store

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"dsec/sandbox"
)

const (
	busyTimeout = 5 * time.Second // of another process, for example a backup; our own writers queue for one connection
	maxReaders  = 4
)

// SQLite is the Store in one file, or in memory.
type SQLite struct {
	write *sql.DB // one connection: writers queue here instead of failing with SQLITE_BUSY
	read  *sql.DB
}

var _ Store = (*SQLite)(nil)

// OpenSQLite opens the database at path, making it and applying migrations if needed. The file is readable by its owner
// only: it holds the key that signs grants. An empty path means a database in memory that ends with Close.
func OpenSQLite(ctx context.Context, path string) (*SQLite, error) {
	dsn, err := dataSource(path)
	if err != nil {
		return nil, err
	}
	s := &SQLite{}
	if s.write, err = sql.Open("sqlite", dsn+"&_txlock=immediate"); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	s.write.SetMaxOpenConns(1)
	s.write.SetMaxIdleConns(1) // an in-memory database lives as long as this connection
	if err := migrate(ctx, s.write, migrations); err != nil {
		return nil, errors.Join(s.write.Close(), fmt.Errorf("open database %s: %w", path, err))
	}
	if s.read, err = sql.Open("sqlite", dsn+"&_pragma=query_only(1)"); err != nil {
		return nil, errors.Join(s.write.Close(), fmt.Errorf("open database: %w", err))
	}
	s.read.SetMaxOpenConns(maxReaders)
	s.read.SetMaxIdleConns(maxReaders)
	return s, nil
}

func dataSource(path string) (string, error) {
	v := url.Values{}
	for _, p := range []string{"foreign_keys(1)", "synchronous(FULL)", fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds())} {
		v.Add("_pragma", p)
	}
	if path == "" {
		var b [8]byte
		if _, err := rand.Read(b[:]); err != nil {
			return "", fmt.Errorf("name database: %w", err)
		}
		v.Set("vfs", "memdb")
		return "file:/dsec-" + hex.EncodeToString(b[:]) + "?" + v.Encode(), nil
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("resolve database path: %w", err)
	}
	// SQLite would make the file with the umask's mode; its -wal and -shm take over the mode of the file.
	f, err := os.OpenFile(abs, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", fmt.Errorf("create database: %w", err)
	}
	if err := f.Close(); err != nil {
		return "", fmt.Errorf("create database: %w", err)
	}
	v.Add("_pragma", "journal_mode(WAL)")
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: abs}).EscapedPath()}).String() + "?" + v.Encode(), nil
}

// Close waits for calls in progress.
func (s *SQLite) Close() error { return errors.Join(s.read.Close(), s.write.Close()) }

// exec runs one writing statement and reports how many rows it changed.
func (s *SQLite) exec(ctx context.Context, what, query string, args ...any) (int64, error) {
	res, err := s.write.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, failure(ctx, what, err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, failure(ctx, what, err)
	}
	return n, nil
}

// failure classifies what the database says. A cancelled call is reported as such, whatever SQLite calls it.
func failure(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", what, ctx.Err())
	}
	var e *sqlite.Error
	if errors.As(err, &e) {
		switch code := e.Code(); {
		case code == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
			return sandbox.Errorf(sandbox.NotFound, "project_not_found", "the project does not exist").WithCause(err)
		case code&0xff == sqlite3.SQLITE_BUSY, code&0xff == sqlite3.SQLITE_LOCKED:
			return sandbox.Errorf(sandbox.Unavailable, "database_busy", "the database is locked by another process; try again").WithCause(err)
		case code&0xff == sqlite3.SQLITE_FULL:
			return sandbox.Errorf(sandbox.ResourceExhausted, "database_full", "the disk that holds the control plane's database is full").WithCause(err)
		case code&0xff == sqlite3.SQLITE_CORRUPT, code&0xff == sqlite3.SQLITE_NOTADB:
			return sandbox.Errorf(sandbox.DataLoss, "database_damaged", "the control plane's database is damaged; restore it from a copy").WithCause(err)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}

func notFound(reason, format string, args ...any) error {
	return sandbox.Errorf(sandbox.NotFound, reason, format, args...)
}

// one scans a single row; a missing one is missing.
func one[T any](ctx context.Context, what string, row *sql.Row, scan func(scanner) (T, error), missing error) (T, error) {
	v, err := scan(row)
	switch {
	case err == nil:
		return v, nil
	case errors.Is(err, sql.ErrNoRows):
		return v, missing
	}
	return v, failure(ctx, what, err)
}

// many scans all rows of a query.
func many[T any](ctx context.Context, db *sql.DB, what string, scan func(scanner) (T, error), query string, args ...any) (list []T, err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, failure(ctx, what, err)
	}
	defer func() {
		if cerr := rows.Close(); cerr != nil && err == nil {
			list, err = nil, failure(ctx, what, cerr)
		}
	}()
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, failure(ctx, what, err)
		}
		list = append(list, v)
	}
	if err := rows.Err(); err != nil {
		return nil, failure(ctx, what, err)
	}
	return list, nil
}

type scanner interface{ Scan(...any) error }

// millis stores the zero time as 0.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMillis(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms).UTC()
}

// columns joins a table's column names, so that every query of a row reads the same ones in the same order.
func columns(names ...string) string { return strings.Join(names, ", ") }
