package store_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dsec/internal/control/store"
	"dsec/internal/control/store/storetest"
	"dsec/sandbox"
)

func open(t *testing.T, path string) *store.SQLite {
	t.Helper()
	s, err := store.OpenSQLite(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestSQLiteFile(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store { return open(t, filepath.Join(t.TempDir(), "a b?%.db")) })
}

func TestSQLiteMemory(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store { return open(t, "") })
}

func TestRowsOutliveTheProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.db")
	s := open(t, path)
	if err := s.AddProject(t.Context(), store.Project{Path: "p", CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	// A second opening while the first is there stands for the reopening after a kill: nothing was closed.
	if _, err := open(t, path).Project(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-wal", "-shm"} {
		fi, err := os.Stat(path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v; the signing key is in it", fi.Name(), fi.Mode())
		}
	}
}

func TestDatabaseFromTheFutureIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.db")
	if err := open(t, path).Close(); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`INSERT INTO schema_version (version) VALUES (99)`); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = store.OpenSQLite(t.Context(), path)
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != "database_newer" || e.Facts["version"] != "99" {
		t.Fatalf("got %v", err)
	}
}

func TestNoDatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.db")
	if err := os.WriteFile(path, []byte("this is not a database, but long enough to be taken for one at first sight"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.OpenSQLite(t.Context(), path); err == nil {
		t.Fatal("a text file was opened as a database")
	}
	if _, err := store.OpenSQLite(t.Context(), filepath.Join(path, "below")); err == nil {
		t.Fatal("a path below a file was opened")
	}
}

func TestMemoryDatabasesAreApart(t *testing.T) {
	a, b := open(t, ""), open(t, "")
	if err := a.AddProject(t.Context(), store.Project{Path: "p", CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Project(context.Background(), "p"); sandbox.ClassOf(err) != sandbox.NotFound {
		t.Fatalf("got %v", err)
	}
}
