// Package ports is what apiserver and edge share about requests to servers inside a sandbox: the form of the routes, the
// hygiene of headers, and byte streams whose two directions end by themselves.
//
// What surprises:
//
//   - Paths behind a route are the inner server's and are passed as they came, unclean and encoded: Parse therefore works
//     on the encoded path and must be asked before anything cleans it.
//   - A raw connection between apiserver and edge (and to a client that wants it) is framed: a stream that was cut
//     differs from one that ended.
package ports

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// A Kind is what is wanted of a sandbox's network.
type Kind uint8

// Kinds of routes.
const (
	HTTP  Kind = iota + 1 // /v1/sandboxes/{id}/ports/{port}/http/{path...}
	TCP                   // /v1/sandboxes/{id}/ports/{port}/tcp
	Fetch                 // /v1/sandboxes/{id}/http?url=…
)

// A Route is a parsed path. Sandbox is not checked.
type Route struct {
	Kind    Kind
	Sandbox string
	Port    int    // 1 to 65,535; of HTTP and TCP
	Path    string // of HTTP: encoded as it came, beginning with a slash
}

// Prefix is the part of an HTTP route before its path.
func (r Route) Prefix() string {
	return root + r.Sandbox + "/ports/" + strconv.Itoa(r.Port) + "/http"
}

const root = "/v1/sandboxes/"

// Parse finds out whether a request's encoded path is one of these routes. One whose port is no port is none.
func Parse(escaped string) (Route, bool) {
	rest, ok := strings.CutPrefix(escaped, root)
	if !ok {
		return Route{}, false
	}
	id, rest, ok := strings.Cut(rest, "/")
	if !ok || id == "" {
		return Route{}, false
	}
	if rest == "http" {
		return Route{Kind: Fetch, Sandbox: id}, true
	}
	if rest, ok = strings.CutPrefix(rest, "ports/"); !ok {
		return Route{}, false
	}
	port, rest, _ := strings.Cut(rest, "/")
	r := Route{Sandbox: id, Port: ParsePort(port)}
	if r.Port == 0 {
		return Route{}, false
	}
	if rest == "tcp" {
		r.Kind = TCP
		return r, true
	}
	path, ok := strings.CutPrefix(rest, "http")
	if !ok || (path != "" && path[0] != '/') {
		return Route{}, false
	}
	r.Kind, r.Path = HTTP, path
	if path == "" {
		r.Path = "/"
	}
	return r, true
}

// ParsePort reads a port in its one form; 0 = it is none.
func ParsePort(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != s {
		return 0
	}
	return n
}

// SetPath makes u's path the encoded one, exactly: url.URL would encode it anew where it holds a byte that should have been
// encoded, and take encoded slashes apart. Such bytes alone are encoded here.
func SetPath(u *url.URL, escaped string) error {
	raw := escaped
	for i := 0; i < len(escaped); i++ {
		if !plain(escaped[i]) {
			raw = encode(escaped)
			break
		}
	}
	path, err := url.PathUnescape(raw)
	if err != nil {
		return err
	}
	u.Path, u.RawPath = path, raw
	return nil
}

// plain reports whether url.URL leaves a byte of a RawPath alone.
func plain(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.IndexByte("/%-_.~!$&'()*+,;=:@[]", c) >= 0
}

func encode(s string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if c := s[i]; plain(c) {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}

// A Request is a request to a server inside, as the edge shall see it.
type Request struct {
	Target string // encoded path and query at the edge
	Host   string // for the server inside; "" = the edge's choice
	// Forwarded are the headers that tell how the server is reached.
	Forwarded http.Header
	// Answer makes the head of an answer fit for the caller. It may be nil.
	Answer func(http.Header)
}

// An Answer is what the edge said instead of a connection. Its body must be closed.
type Answer struct{ *http.Response }

func (a Answer) Error() string { return "the edge answered " + a.Status }
