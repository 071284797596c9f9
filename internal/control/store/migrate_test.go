package store

import (
	"database/sql"
	"path/filepath"
	"testing"
)

func TestMigrationsRunOnceAndWhole(t *testing.T) {
	db, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "m.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	first := []string{`CREATE TABLE a (x TEXT)`}
	if err := migrate(t.Context(), db, first); err != nil {
		t.Fatal(err)
	}
	if err := migrate(t.Context(), db, first); err != nil { // would fail if the table were made again
		t.Fatal(err)
	}
	// A step that fails takes the steps before it back.
	if err := migrate(t.Context(), db, append(first, `CREATE TABLE b (x TEXT)`, `CREATE TABLE a (x TEXT)`)); err == nil {
		t.Fatal("a failing step was accepted")
	}
	if _, err := db.Exec(`SELECT * FROM b`); err == nil {
		t.Error("half a migration stayed")
	}
	if err := migrate(t.Context(), db, append(first, `CREATE TABLE b (x TEXT)`)); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`SELECT * FROM b`); err != nil {
		t.Error(err)
	}
}
