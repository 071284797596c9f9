package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"

	"dsec/internal/control/iam"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// Requests to servers inside a sandbox. On the API's own host they come with a key; see portsite.go for browsers.

type portKey struct{}

// portRoute finds out whether a request is for a server inside, by its path as it came.
func portRoute(r *http.Request) (ports.Route, bool) {
	return ports.Parse(rawPath(r))
}

// rawPath is a request's path as it came.
func rawPath(r *http.Request) string {
	raw, _, _ := strings.Cut(r.RequestURI, "?")
	if !strings.HasPrefix(raw, "/") { // the absolute form
		raw = r.URL.EscapedPath()
	}
	return raw
}

// credentials takes the platform's key from a request. What else there is in Authorization stays only for a server inside,
// and only if it is no key of ours.
func credentials(r *http.Request) (header string) {
	_, inside := portRoute(r)
	own := r.Header.Get(ports.Authorization)
	given := r.Header.Get("Authorization")
	r.Header.Del(ports.Authorization)
	if own == "" || !inside || iam.LooksLikeKey(given) {
		r.Header.Del("Authorization") // nothing further in needs it, so nothing further in can leak it
	}
	if own != "" && inside {
		return own
	}
	return given
}

// servePort is the handler of the routes that ports.Parse knows.
func (s *Server) servePort(w http.ResponseWriter, r *http.Request) {
	x := w.(*exchange)
	rt, _ := r.Context().Value(portKey{}).(ports.Route)
	if rt.Kind == 0 { // found by its pattern alone
		x.fail(r, sandbox.Errorf(sandbox.InvalidArgument, "invalid_port", "a port is a number from 1 to 65535"))
		return
	}
	id, e, signed, err := s.target(x.who, rt.Sandbox)
	if err != nil {
		x.fail(r, err)
		return
	}
	onError := func(_ http.ResponseWriter, r *http.Request, err error) { x.fail(r, about(id, err)) }
	target := "/v1/sandboxes/" + string(id) + "/http"
	if rt.Kind != ports.Fetch {
		target = rt.Prefix() + rt.Path
	}
	if r.URL.RawQuery != "" || r.URL.ForceQuery {
		target += "?" + r.URL.RawQuery
	}
	if rt.Kind == ports.TCP {
		s.serveTCP(x, r, id, e, signed, rt)
		return
	}
	_ = x.control.EnableFullDuplex() // HTTP/2 needs none
	req := ports.Request{Target: target, Answer: ports.FromInside}
	if rt.Kind == ports.HTTP {
		req.Host = net.JoinHostPort("localhost", strconv.Itoa(rt.Port))
		req.Forwarded = forwarded(r, "http")
		req.Forwarded.Set("X-Forwarded-Prefix", rt.Prefix())
	}
	e.ServePort(x, r, signed, req, onError)
}

// forwarded tells a server inside how it is reached.
func forwarded(r *http.Request, scheme string) http.Header {
	h := http.Header{"X-Forwarded-Proto": {scheme}, "X-Forwarded-Host": {r.Host}}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		h.Set("X-Forwarded-For", host)
	}
	return h
}

// serveTCP changes the protocol to the bytes of a TCP connection to a port inside.
func (s *Server) serveTCP(x *exchange, r *http.Request, id sandbox.ID, e Edge, signed string, rt ports.Route) {
	protocol := ports.Upgrade(r.Header)
	if r.ProtoMajor != 1 || (protocol != ports.UpgradeRaw && protocol != ports.UpgradeFrames) || r.Method != http.MethodGet {
		x.status = http.StatusUpgradeRequired
		x.fail(r, sandbox.Errorf(sandbox.InvalidArgument, "upgrade_required",
			"this route is a GET over HTTP/1.1 with `Connection: Upgrade` and `Upgrade: %s`", ports.UpgradeRaw))
		return
	}
	inside, err := e.DialPort(r.Context(), signed, fmt.Sprintf("/v1/sandboxes/%s/ports/%d/tcp", id, rt.Port))
	var answer ports.Answer
	switch {
	case errors.As(err, &answer):
		x.pass(answer)
		return
	case err != nil:
		x.fail(r, about(id, err))
		return
	}
	caller, err := x.hijack(protocol)
	if err != nil {
		_ = inside.Close() // the caller is gone
		x.fail(r, err)
		return
	}
	_ = ports.Join(caller, inside) // both sides know
}

// pass answers with what the edge answered.
func (x *exchange) pass(a ports.Answer) {
	defer a.Body.Close()
	for _, name := range []string{"Content-Type", ports.Error} {
		if v := a.Header.Get(name); v != "" {
			x.Header().Set(name, v)
		}
	}
	x.WriteHeader(a.StatusCode)
	_, _ = io.Copy(x, io.LimitReader(a.Body, maxMessage)) // who left does not read it
}

// hijack takes the connection over and says that it changes its protocol.
func (x *exchange) hijack(protocol string) (ports.Stream, error) {
	conn, buffered, err := x.control.Hijack()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "connection_lost", "the connection cannot be taken over").WithCause(err)
	}
	x.code = http.StatusSwitchingProtocols
	if _, err := fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", protocol); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	h := ports.NewHijacked(conn, buffered)
	if protocol == ports.UpgradeFrames {
		return ports.NewFrames(h), nil
	}
	return h, nil
}

func withRoute(r *http.Request, rt ports.Route) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), portKey{}, rt))
}
