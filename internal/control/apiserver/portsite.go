package apiserver

import (
	"context"
	"html"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/control/iam"
	"dsec/internal/grpcerr"
	"dsec/internal/inflight"
	"dsec/internal/ports"
	"dsec/sandbox"
)

// Browsers reach a port on a host of its own, <port>-<sandbox id>.<domain>: an origin that the server inside shares with
// nobody. No route of the API exists on such a host, and its cookie opens nothing on the API's.

// A PortSite says where browsers reach ports. Hosts at and below Domain are no hosts of the API, Domain itself excepted.
type PortSite struct {
	Scheme string // http or https
	Domain string // in lower case; "" = ports have no URLs
	Port   int    // in URLs; 0 = the scheme's own
}

// ParsePortSite reads "[http[s]://]domain[:port]". Without a scheme URLs are http, with the listener's port.
func ParsePortSite(s string, listener int) (PortSite, error) {
	site := PortSite{Scheme: "http", Port: listener}
	if scheme, rest, ok := strings.Cut(s, "://"); ok {
		site.Scheme, site.Port, s = scheme, 0, rest
	}
	if domain, port, ok := strings.Cut(s, ":"); ok {
		s = domain
		if site.Port = ports.ParsePort(port); site.Port == 0 {
			return PortSite{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_ports_domain", "%q is not a port", port)
		}
	}
	site.Domain = strings.ToLower(strings.TrimSuffix(s, "."))
	u, err := url.Parse("http://" + site.Domain)
	if (site.Scheme != "http" && site.Scheme != "https") || err != nil || site.Domain == "" || u.Host != site.Domain || u.Port() != "" ||
		net.ParseIP(site.Domain) != nil || strings.ContainsAny(site.Domain, "[]_") || len(site.Domain) > 200 {
		return PortSite{}, sandbox.Errorf(sandbox.InvalidArgument, "invalid_ports_domain", "%q is not a domain, with http:// or https:// before it and a port behind it if need be", s)
	}
	return site, nil
}

// match finds the label before the domain. A host below the domain is the site's, whatever its label is.
func (p PortSite) match(host string) (label string, ok bool) {
	if p.Domain == "" {
		return "", false
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.CutSuffix(strings.ToLower(strings.TrimSuffix(host, ".")), "."+p.Domain)
}

// url is the URL of a port.
func (p PortSite) url(id sandbox.ID, port int, token string) string {
	host := strconv.Itoa(port) + "-" + string(id) + "." + p.Domain
	if p.Port != 0 && (p.Scheme != "http" || p.Port != 80) && (p.Scheme != "https" || p.Port != 443) {
		host = net.JoinHostPort(host, strconv.Itoa(p.Port))
	}
	return (&url.URL{Scheme: p.Scheme, Host: host, Path: "/", RawQuery: tokenParameter + "=" + token}).String()
}

// cookie is the name of the platform's cookie. With TLS browsers refuse it from any other host.
func (p PortSite) cookie() string {
	if p.Scheme == "https" {
		return "__Host-dsec_port"
	}
	return "dsec_port"
}

const (
	tokenParameter = "dsec_token"
	defaultPortURL = time.Hour
	maxPortURL     = 7 * 24 * time.Hour
)

// CreatePortURL implements the service.
func (v sandboxService) CreatePortURL(ctx context.Context, r *connect.Request[dsecv1.CreatePortURLRequest]) (*connect.Response[dsecv1.CreatePortURLResponse], error) {
	s, who, m := v.s, exchangeOf(ctx).who, r.Msg
	expires := seconds(m.GetExpiresSeconds())
	switch {
	case s.o.PortSite.Domain == "":
		return nil, sandbox.Errorf(sandbox.Unsupported, "no_ports_domain", "this platform has no domain for ports; `dsec up --ports-domain` gives it one")
	case m.GetPort() < 1 || m.GetPort() > 65535:
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_port", "port %d is not 1 to 65535", m.GetPort())
	case expires == 0:
		expires = defaultPortURL
	case expires < 0 || expires > maxPortURL:
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_expiry", "a URL of a port lives for 1 s to %v", maxPortURL)
	}
	id, e, signed, err := s.target(who, m.GetSandboxId())
	if err != nil {
		return nil, err
	}
	sb, err := e.GetSandbox(ctx, signed, &edgev1.GetSandboxRequest{Id: string(id)})
	if err != nil {
		return nil, about(id, err)
	}
	if st := sb.GetState(); st != dsecv1.State_STATE_READY && st != dsecv1.State_STATE_CREATING {
		return nil, about(id, sandbox.Errorf(sandbox.FailedPrecondition, "sandbox_ended", "sandbox %s has ended; create a new one", id))
	}
	until := s.o.Now().Add(expires).Truncate(time.Second)
	token := s.o.IAM.SignPort(iam.PortToken{
		Sandbox: string(id), Port: int(m.GetPort()), Project: who.Project, Principal: who.Principal, KeyID: who.KeyID, Expires: until.Unix(),
	})
	return connect.NewResponse(&dsecv1.CreatePortURLResponse{Url: s.o.PortSite.url(id, int(m.GetPort()), token), ExpiresAt: timestamppb.New(until)}), nil
}

// A visit is a browser's request to a port's host.
type visit struct {
	id      sandbox.ID
	port    int
	edge    Edge
	signed  string
	byToken string // the token of the query that proved it, "" if the cookie did
	expires time.Time
}

// serveSite answers on the hosts of ports.
func (s *Server) serveSite(x *exchange, r *http.Request, label string) {
	defer s.finish(x, r, s.o.Now())
	v, err := s.visit(x, r, label)
	if err != nil {
		x.page(r, err)
		return
	}
	query, hadToken := withoutToken(r.URL.RawQuery)
	if v.byToken != "" && (r.Method == http.MethodGet || r.Method == http.MethodHead) && !ports.IsUpgrade(r) {
		s.welcome(x, r, v, query)
		return
	}
	if !hadToken {
		query = r.URL.RawQuery
	}
	place, err := s.under.Enter(x.who.Project, inflight.Stream)
	if err != nil {
		x.page(r, err)
		return
	}
	defer place.Leave()
	_ = x.control.EnableFullDuplex() // HTTP/2 needs none
	if r.Body != nil && r.Body != http.NoBody {
		x.boundBody(r, noLimit, 0)
	}
	s.conceal(r)
	target := ports.Route{Sandbox: string(v.id), Port: v.port}.Prefix() + rawPath(r)
	if query != "" {
		target += "?" + query
	}
	req := ports.Request{Target: target, Host: r.Host, Forwarded: forwarded(r, s.o.PortSite.Scheme), Answer: func(h http.Header) {
		ports.FromInsideToOwnOrigin(h, s.o.PortSite.cookie())
	}}
	v.edge.ServePort(x, r, v.signed, req, func(_ http.ResponseWriter, r *http.Request, err error) { x.page(r, about(v.id, err)) })
}

// visit finds out whether a request may go to the port that its host names.
func (s *Server) visit(x *exchange, r *http.Request, label string) (*visit, error) {
	first, second, _ := strings.Cut(label, "-")
	port := ports.ParsePort(first)
	id, err := sandbox.ParseID(second)
	if err != nil || port == 0 {
		return nil, sandbox.Errorf(sandbox.NotFound, "no_such_host", "no port of a sandbox has this address; ask for a new link")
	}
	v := &visit{id: id, port: port}
	var failed error
	try := func(token string) bool {
		t, who, err := s.o.IAM.VerifyPort(r.Context(), token)
		if err == nil && (t.Sandbox != string(id) || t.Port != port) {
			err = sandbox.Errorf(sandbox.Unauthenticated, "bad_port_token", "this link is for another address; ask for a new one")
		}
		if err == nil && !who.May(iam.Use) {
			err = sandbox.Errorf(sandbox.PermissionDenied, "permission_denied", "the key that made this link may not use sandboxes any more")
		}
		if err != nil {
			failed = err
			return false
		}
		x.who, v.expires = who, time.Unix(t.Expires, 0)
		return true
	}
	if token := r.URL.Query().Get(tokenParameter); token != "" && try(token) {
		v.byToken = token
	} else if !s.byCookie(r, try) {
		if failed == nil {
			failed = sandbox.Errorf(sandbox.Unauthenticated, "no_port_token", "this address needs a link that the platform made; ask for one")
		}
		return nil, failed
	} else if err := sameOrigin(r); err != nil {
		return nil, err
	}
	var terr error
	_, v.edge, v.signed, terr = s.target(x.who, string(id))
	return v, terr
}

// byCookie tries all cookies of the name: a sibling host may have set one.
func (s *Server) byCookie(r *http.Request, try func(string) bool) bool {
	const most = 8
	for i, c := range r.CookiesNamed(s.o.PortSite.cookie()) {
		if i < most && try(c.Value) {
			return true
		}
	}
	return false
}

// sameOrigin refuses what the page of another host asks for in the browser's name. Hosts of sandboxes are siblings, which
// SameSite does not tell apart.
func sameOrigin(r *http.Request) error {
	refused := sandbox.Errorf(sandbox.PermissionDenied, "cross_origin", "a page of another address may not use this one")
	if origins := r.Header["Origin"]; len(origins) > 0 {
		u, err := url.Parse(origins[0])
		if len(origins) > 1 || err != nil || !strings.EqualFold(u.Host, r.Host) {
			return refused
		}
		return nil
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin", "none":
		return nil
	}
	if r.Header.Get("Sec-Fetch-Mode") == "navigate" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		return nil // somebody follows a link
	}
	return refused
}

// welcome puts the token into a cookie and sends the browser to the address without it.
func (s *Server) welcome(x *exchange, r *http.Request, v *visit, query string) {
	site := s.o.PortSite
	http.SetCookie(x, &http.Cookie{
		Name: site.cookie(), Value: v.byToken, Path: "/", Expires: v.expires, HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: site.Scheme == "https",
	})
	x.Header().Set("Cache-Control", "no-store")
	x.Header().Set("Referrer-Policy", "no-referrer")
	to := r.URL.EscapedPath()
	if !strings.HasPrefix(to, "/") || strings.HasPrefix(to, "//") || strings.HasPrefix(to, "/\\") { // would lead to another host
		to = "/"
	}
	if query != "" {
		to += "?" + query
	}
	x.Header().Set("Location", to)
	x.WriteHeader(http.StatusSeeOther)
}

// conceal removes from a request what the server inside shall not see.
func (s *Server) conceal(r *http.Request) {
	name := s.o.PortSite.cookie()
	var kept []string
	for _, line := range r.Header["Cookie"] {
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if n, _, _ := strings.Cut(part, "="); part != "" && strings.TrimSpace(n) != name {
				kept = append(kept, part)
			}
		}
	}
	r.Header.Del("Cookie")
	if len(kept) > 0 {
		r.Header.Set("Cookie", strings.Join(kept, "; "))
	}
	if ref := r.Header.Get("Referer"); strings.Contains(ref, tokenParameter) {
		r.Header.Del("Referer")
	}
	if iam.LooksLikeKey(r.Header.Get("Authorization")) {
		r.Header.Del("Authorization")
	}
	r.Header.Del(ports.Authorization)
}

// withoutToken takes the token out of a query and leaves the rest as it is.
func withoutToken(raw string) (rest string, had bool) {
	var kept []string
	for part := range strings.SplitSeq(raw, "&") {
		name, _, _ := strings.Cut(part, "=")
		if n, err := url.QueryUnescape(name); err == nil && n == tokenParameter {
			had = true
		} else if part != "" {
			kept = append(kept, part)
		}
	}
	return strings.Join(kept, "&"), had
}

// page says what is wrong: to a person where one asks, else as an error of the API.
func (x *exchange) page(r *http.Request, err error) {
	e := classify(err)
	if x.code != 0 || !strings.Contains(r.Header.Get("Accept"), "text/html") {
		x.fail(r, err)
		return
	}
	x.failure = e
	x.advise()
	h := x.Header()
	h.Set(ports.Error, e.Reason)
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	x.WriteHeader(grpcerr.HTTPStatus(e.Class))
	_, _ = x.Write([]byte("<!doctype html><title>dsec</title><p>" + html.EscapeString(e.Message) + "\n")) // a browser that is gone does not read it
}
