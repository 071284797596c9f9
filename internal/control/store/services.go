package store

import (
	"context"
	"encoding/json"
	"fmt"

	"dsec/sandbox"
)

var serviceColumns = columns("name", "endpoints", "description", "changed_ms", "changed_by")

// An endpointRow is one endpoint as the column holds it.
type endpointRow struct {
	Host     string `json:"host"`
	First    int    `json:"first,omitempty"`
	Last     int    `json:"last,omitempty"`
	Protocol string `json:"protocol"`
}

func scanService(s scanner) (Service, error) {
	var v Service
	var endpoints string
	var changed int64
	if err := s.Scan(&v.Name, &endpoints, &v.Description, &changed, &v.ChangedBy); err != nil {
		return Service{}, err
	}
	var rows []endpointRow
	if err := json.Unmarshal([]byte(endpoints), &rows); err != nil {
		return Service{}, fmt.Errorf("service %s has endpoints that cannot be read: %w", v.Name, err)
	}
	for _, r := range rows {
		v.Endpoints = append(v.Endpoints, sandbox.NetworkEndpoint{Host: r.Host, FirstPort: r.First, LastPort: r.Last, Protocol: r.Protocol})
	}
	v.ChangedAt = fromMillis(changed)
	return v, nil
}

// putService inserts a row; onConflict says what happens where the name has one.
func (s *SQLite) putService(ctx context.Context, what string, v Service, onConflict string) (changed bool, err error) {
	rows := make([]endpointRow, len(v.Endpoints))
	for i, e := range v.Endpoints {
		rows[i] = endpointRow{e.Host, e.FirstPort, e.LastPort, e.Protocol}
	}
	endpoints, err := json.Marshal(rows)
	if err != nil {
		return false, fmt.Errorf("%s: %w", what, err)
	}
	n, err := s.exec(ctx, what, `INSERT INTO network_services (`+serviceColumns+`) VALUES (?, ?, ?, ?, ?) ON CONFLICT `+onConflict,
		v.Name, string(endpoints), v.Description, millis(v.ChangedAt), v.ChangedBy)
	return n > 0, err
}

const replaceService = `(name) DO UPDATE SET endpoints = excluded.endpoints, description = excluded.description,
	changed_ms = excluded.changed_ms, changed_by = excluded.changed_by`

// PutService implements Store.
func (s *SQLite) PutService(ctx context.Context, v Service) error {
	_, err := s.putService(ctx, "put service", v, replaceService)
	return err
}

// AddService implements Store.
func (s *SQLite) AddService(ctx context.Context, v Service) error {
	added, err := s.putService(ctx, "add service", v, replaceService+` WHERE network_services.endpoints = ''`)
	if err == nil && !added {
		return sandbox.Errorf(sandbox.AlreadyExists, "service_exists", "there is a service %q", v.Name)
	}
	return err
}

// DefineService implements Store.
func (s *SQLite) DefineService(ctx context.Context, v Service) (bool, error) {
	return s.putService(ctx, "define service", v, `DO NOTHING`)
}

func missingService(name string) error {
	return notFound("service_not_found", "there is no service %q", name)
}

// Service implements Store.
func (s *SQLite) Service(ctx context.Context, name string) (Service, error) {
	row := s.read.QueryRowContext(ctx, `SELECT `+serviceColumns+` FROM network_services WHERE name = ? AND endpoints <> ''`, name)
	return one(ctx, "find service", row, scanService, missingService(name))
}

// Services implements Store.
func (s *SQLite) Services(ctx context.Context, after string, limit int) ([]Service, error) {
	return many(ctx, s.read, "list services", scanService,
		`SELECT `+serviceColumns+` FROM network_services WHERE name > ? AND endpoints <> '' ORDER BY name LIMIT ?`, after, Limit(limit))
}

// RemoveService implements Store.
func (s *SQLite) RemoveService(ctx context.Context, name string) error {
	n, err := s.exec(ctx, "remove service", `UPDATE network_services SET endpoints = '' WHERE name = ? AND endpoints <> ''`, name)
	if err == nil && n == 0 {
		return missingService(name)
	}
	return err
}
