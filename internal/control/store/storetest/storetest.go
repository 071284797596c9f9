// Package storetest is the conformance suite of store.Store: every implementation passes it.
package storetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"time"

	"dsec/internal/control/store"
	"dsec/sandbox"
)

const project = "default"

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)

// Run tests what open makes. Every call of open must give an empty store, and close it with t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) store.Store) {
	for name, test := range map[string]func(*testing.T, store.Store){
		"keys": keys, "projects": projects, "edges": edges, "names": names, "names replaced": namesReplaced,
		"pages": pages, "pages under change": pagesUnderChange, "manifests": manifests, "secret": secret, "services": services,
		"cancelled": cancelled, "concurrent": concurrent, "hostile strings": hostileStrings,
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			if err := s.AddProject(t.Context(), store.Project{Path: project, CreatedAt: epoch}); err != nil {
				t.Fatal(err)
			}
			test(t, s)
		})
	}
}

func want(t *testing.T, err error, class sandbox.Class, reason string) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != class || e.Reason != reason {
		t.Fatalf("got %v; want %s %s", err, class, reason)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func key(id string) store.Key {
	return store.Key{ID: id, Hash: sha256.Sum256([]byte(id)), Principal: "ann", Project: project, Role: "user", CreatedAt: epoch}
}

func keys(t *testing.T, s store.Store) {
	ctx := t.Context()
	a := key("ka")
	a.ExpiresAt = epoch.Add(time.Hour)
	must(t, s.AddKey(ctx, a))
	got, err := s.KeyByHash(ctx, a.Hash)
	must(t, err)
	if got != a {
		t.Errorf("got %+v; want %+v", got, a)
	}
	want(t, s.AddKey(ctx, a), sandbox.AlreadyExists, "key_exists")
	same := key("kb")
	same.Hash = a.Hash
	want(t, s.AddKey(ctx, same), sandbox.AlreadyExists, "key_exists")
	orphan := key("kc")
	orphan.Project = "nowhere"
	want(t, s.AddKey(ctx, orphan), sandbox.NotFound, "project_not_found")
	_, err = s.KeyByHash(ctx, store.Hash{})
	want(t, err, sandbox.NotFound, "key_not_found")

	must(t, s.RevokeKey(ctx, "ka", epoch.Add(time.Minute)))
	must(t, s.RevokeKey(ctx, "ka", epoch.Add(time.Hour))) // the first time stays
	got, err = s.KeyByHash(ctx, a.Hash)
	must(t, err)
	if !got.RevokedAt.Equal(epoch.Add(time.Minute)) {
		t.Errorf("revoked at %v", got.RevokedAt)
	}
	want(t, s.RevokeKey(ctx, "kz", epoch), sandbox.NotFound, "key_not_found")
}

func projects(t *testing.T, s store.Store) {
	ctx := t.Context()
	want(t, s.AddProject(ctx, store.Project{Path: project}), sandbox.AlreadyExists, "project_exists")
	must(t, s.AddProject(ctx, store.Project{Path: "default/child", CreatedAt: epoch}))
	p, err := s.Project(ctx, "default/child")
	must(t, err)
	if !p.CreatedAt.Equal(epoch) {
		t.Errorf("created at %v", p.CreatedAt)
	}
	_, err = s.Project(ctx, "other")
	want(t, err, sandbox.NotFound, "project_not_found")
	list, err := s.Projects(ctx, "", 0)
	must(t, err)
	if len(list) != 2 || list[0].Path != "default" || list[1].Path != "default/child" {
		t.Errorf("got %+v", list)
	}
}

func edges(t *testing.T, s store.Store) {
	ctx := t.Context()
	e := store.Edge{Code: "eaaaa", Address: "unix:///a", JoinedAt: epoch}
	must(t, s.PutEdge(ctx, e))
	must(t, s.PutEdge(ctx, store.Edge{Code: "daaaa", Address: "unix:///d", JoinedAt: epoch}))
	must(t, s.PutEdge(ctx, store.Edge{Code: "eaaaa", Address: "unix:///b", JoinedAt: epoch.Add(time.Hour)}))
	got, err := s.Edge(ctx, "eaaaa")
	must(t, err)
	if got.Address != "unix:///b" || !got.JoinedAt.Equal(epoch) {
		t.Errorf("got %+v", got)
	}
	list, err := s.Edges(ctx)
	must(t, err)
	if len(list) != 2 || list[0].Code != "daaaa" {
		t.Errorf("got %+v", list)
	}
	_, err = s.Edge(ctx, "zaaaa")
	want(t, err, sandbox.NotFound, "edge_not_found")
}

func digest(i int) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(fmt.Append(nil, i))) }

func name(kind, n, tag string, d int) store.Name {
	return store.Name{Project: project, Kind: kind, Name: n, Tag: tag, Digest: digest(d), CreatedAt: epoch, CreatedBy: "ann"}
}

func names(t *testing.T, s store.Store) {
	ctx := t.Context()
	n := name("base", "python", "3.12", 1)
	must(t, s.PutName(ctx, n))
	got, err := s.Name(ctx, project, "base", "python", "3.12")
	must(t, err)
	if got != n {
		t.Errorf("got %+v; want %+v", got, n)
	}
	for _, miss := range [][4]string{{"other", "base", "python", "3.12"}, {project, "toolkit", "python", "3.12"}, {project, "base", "Python", "3.12"}, {project, "base", "python", "3"}} {
		_, err = s.Name(ctx, miss[0], miss[1], miss[2], miss[3])
		want(t, err, sandbox.NotFound, "environment_not_found")
	}
	orphan := n
	orphan.Project = "nowhere"
	want(t, s.PutName(ctx, orphan), sandbox.NotFound, "project_not_found")
	must(t, s.RemoveName(ctx, project, "base", "python", "3.12"))
	want(t, s.RemoveName(ctx, project, "base", "python", "3.12"), sandbox.NotFound, "environment_not_found")
}

func namesReplaced(t *testing.T, s store.Store) {
	ctx := t.Context()
	must(t, s.PutName(ctx, name("base", "a", "1", 1)))
	next := name("base", "a", "1", 2)
	next.CreatedAt, next.CreatedBy = epoch.Add(time.Hour), "bob"
	must(t, s.PutName(ctx, next))
	got, err := s.Name(ctx, project, "base", "a", "1")
	must(t, err)
	if got != next {
		t.Errorf("got %+v; want %+v", got, next)
	}
}

func manifests(t *testing.T, s store.Store) {
	ctx := t.Context()
	_, err := s.Manifest(ctx, project, digest(1))
	want(t, err, sandbox.NotFound, "environment_not_found")
	must(t, s.PutName(ctx, name("base", "a", "1", 1)))
	must(t, s.PutName(ctx, name("base", "b", "1", 1))) // a second name of the same
	must(t, s.RemoveName(ctx, project, "base", "a", "1"))
	must(t, s.RemoveName(ctx, project, "base", "b", "1"))
	m, err := s.Manifest(ctx, project, digest(1))
	must(t, err)
	if m.Kind != "base" || m.Digest != digest(1) || m.CreatedBy != "ann" {
		t.Errorf("got %+v", m)
	}
	_, err = s.Manifest(ctx, "other", digest(1))
	want(t, err, sandbox.NotFound, "environment_not_found")
}

// walk lists all names in pages of size, calling between after each page.
func walk(t *testing.T, s store.Store, kind string, size int, between func(page int)) []store.NameKey {
	t.Helper()
	var all []store.NameKey
	var after store.NameKey
	for page := 0; ; page++ {
		list, err := s.Names(t.Context(), project, kind, after, size)
		must(t, err)
		if len(list) > size {
			t.Fatalf("a page of %d has %d", size, len(list))
		}
		for _, n := range list {
			all = append(all, n.Key())
		}
		if len(list) < size {
			return all
		}
		after = list[len(list)-1].Key()
		between(page)
	}
}

func pages(t *testing.T, s store.Store) {
	for i := range 30 {
		must(t, s.PutName(t.Context(), name([]string{"base", "toolkit"}[i%2], fmt.Sprintf("n%02d", i/4), fmt.Sprintf("t%d", i%4/2), i)))
	}
	nothing := func(int) {}
	if got := walk(t, s, "", 7, nothing); len(got) != 30 {
		t.Errorf("all: %d of 30", len(got))
	}
	for _, size := range []int{1, 2, 5, 15, 100} {
		got := walk(t, s, "toolkit", size, nothing)
		if len(got) != 15 {
			t.Errorf("size %d: %d of 15", size, len(got))
		}
		for i := 1; i < len(got); i++ {
			if a, b := got[i-1], got[i]; a.Name > b.Name || (a.Name == b.Name && a.Tag >= b.Tag) {
				t.Errorf("size %d: %v before %v", size, a, b)
			}
		}
	}
}

func pagesUnderChange(t *testing.T, s store.Store) {
	for i := range 20 {
		must(t, s.PutName(t.Context(), name("base", fmt.Sprintf("n%02d", i), "1", i)))
	}
	seen := map[store.NameKey]int{}
	for _, k := range walk(t, s, "base", 3, func(page int) {
		// Rows come and go before and after the place where the list is.
		must(t, s.PutName(t.Context(), name("base", fmt.Sprintf("a%d", page), "1", 100+page)))
		if page%2 == 1 {
			must(t, s.RemoveName(t.Context(), project, "base", fmt.Sprintf("a%d", page-1), "1"))
		}
	}) {
		seen[k]++
	}
	for i := range 20 {
		if n := seen[store.NameKey{Kind: "base", Name: fmt.Sprintf("n%02d", i), Tag: "1"}]; n != 1 {
			t.Errorf("n%02d was listed %d times", i, n)
		}
	}
}

func service(name string, ports ...int) store.Service {
	s := store.Service{Service: sandbox.Service{Name: name, Description: "what it is'; for"}, ChangedAt: epoch, ChangedBy: "ann"}
	for _, p := range ports {
		s.Endpoints = append(s.Endpoints, sandbox.NetworkEndpoint{Host: "a.example.org", FirstPort: p, LastPort: p + 1, Protocol: sandbox.UDP})
	}
	return s
}

func services(t *testing.T, s store.Store) {
	ctx := t.Context()
	got := func(name string) store.Service {
		t.Helper()
		v, err := s.Service(ctx, name)
		must(t, err)
		return v
	}
	_, err := s.Service(ctx, "pypi")
	want(t, err, sandbox.NotFound, "service_not_found")
	want(t, s.RemoveService(ctx, "pypi"), sandbox.NotFound, "service_not_found")

	must(t, s.PutService(ctx, service("pypi", 443)))
	if v := got("pypi"); !reflect.DeepEqual(v, service("pypi", 443)) {
		t.Errorf("got %+v", v)
	}
	must(t, s.PutService(ctx, service("pypi", 443, 80)))
	want(t, s.AddService(ctx, service("pypi", 1)), sandbox.AlreadyExists, "service_exists")
	if defined, err := s.DefineService(ctx, service("pypi", 2)); err != nil || defined {
		t.Errorf("defined over another: %v, %v", defined, err)
	}
	if v := got("pypi"); len(v.Endpoints) != 2 {
		t.Errorf("got %+v", v)
	}

	must(t, s.RemoveService(ctx, "pypi"))
	_, err = s.Service(ctx, "pypi")
	want(t, err, sandbox.NotFound, "service_not_found")
	want(t, s.RemoveService(ctx, "pypi"), sandbox.NotFound, "service_not_found")
	if defined, err := s.DefineService(ctx, service("pypi", 2)); err != nil || defined {
		t.Errorf("one that was removed is back: %v, %v", defined, err)
	}
	must(t, s.AddService(ctx, service("pypi", 3))) // somebody wants it again
	if v := got("pypi"); v.Endpoints[0].FirstPort != 3 {
		t.Errorf("got %+v", v)
	}
	if defined, err := s.DefineService(ctx, service("npm", 4)); err != nil || !defined {
		t.Errorf("not defined: %v, %v", defined, err)
	}
	must(t, s.AddService(ctx, service("apt", 5)))
	must(t, s.RemoveService(ctx, "apt"))
	list, err := s.Services(ctx, "", 10)
	must(t, err)
	if len(list) != 2 || list[0].Name != "npm" || list[1].Name != "pypi" {
		t.Errorf("got %+v", list)
	}
	list, err = s.Services(ctx, "npm", 1)
	must(t, err)
	if len(list) != 1 || list[0].Name != "pypi" {
		t.Errorf("got %+v", list)
	}
}

func secret(t *testing.T, s store.Store) {
	ctx := t.Context()
	if _, err := s.Secret(ctx, "sign", func() ([]byte, error) { return nil, errors.New("no randomness") }); err == nil {
		t.Fatal("the error of make was lost")
	}
	var wg sync.WaitGroup
	got := make([][]byte, 8)
	for i := range got {
		wg.Go(func() {
			v, err := s.Secret(ctx, "sign", func() ([]byte, error) { return []byte{byte(i)}, nil })
			if err != nil {
				t.Error(err)
			}
			got[i] = v
		})
	}
	wg.Wait()
	for i := range got {
		if len(got[i]) != 1 || !bytes.Equal(got[i], got[0]) {
			t.Errorf("caller %d got %v, caller 0 %v", i, got[i], got[0])
		}
	}
}

func cancelled(t *testing.T, s store.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.PutName(ctx, name("base", "a", "1", 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("PutName: %v", err)
	}
	if _, err := s.Names(ctx, project, "", store.NameKey{}, 10); !errors.Is(err, context.Canceled) {
		t.Errorf("Names: %v", err)
	}
	if _, err := s.KeyByHash(ctx, store.Hash{}); !errors.Is(err, context.Canceled) {
		t.Errorf("KeyByHash: %v", err)
	}
	must(t, s.PutName(t.Context(), name("base", "a", "1", 1))) // the connection is still good
}

func concurrent(t *testing.T, s store.Store) {
	ctx := t.Context()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				if err := s.PutName(ctx, name("base", "same", "1", w*100+i)); err != nil {
					t.Error(err)
				}
				if n, err := s.Name(ctx, project, "base", "same", "1"); err != nil || n.Digest == "" {
					t.Errorf("got %+v, %v", n, err)
				}
			}
		})
	}
	wg.Wait()
	list, err := s.Names(ctx, project, "", store.NameKey{}, 10)
	must(t, err)
	if len(list) != 1 {
		t.Errorf("%d names", len(list))
	}
}

func hostileStrings(t *testing.T, s store.Store) {
	ctx := t.Context()
	for i, evil := range []string{"'; DROP TABLE names; --", "%", "_", "", "é"} {
		n := name("base", evil, "1", i)
		must(t, s.PutName(ctx, n))
		got, err := s.Name(ctx, project, "base", evil, "1")
		must(t, err)
		if got != n {
			t.Errorf("%q: got %+v", evil, got)
		}
	}
}
