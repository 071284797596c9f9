package ports

import (
	"net/http"
	"net/textproto"
	"strings"
)

// Headers of these routes.
const (
	// Authorization carries the platform's key where the caller's Authorization is meant for the server inside.
	Authorization = "Dsec-Authorization"
	// Error is the reason of an answer that the platform gave, and never of one from inside.
	Error = "Dsec-Error"
	// Inner precedes the names of headers from inside that would act on the platform's own origin.
	Inner = "Dsec-Inner-"
	// Host is, between apiserver and edge, the Host that the server inside shall see.
	Host = "Dsec-Host"
)

// Upgrades that a TCP route offers.
const (
	UpgradeRaw    = "dsec-tcp"        // bytes as they are
	UpgradeFrames = "dsec-tcp-frames" // see Frames
)

// MaxHead bounds the head of an answer from inside, in bytes.
const MaxHead = 64 << 10

const reserved = "Dsec-" // names that are the platform's in both directions

// forwardedHeaders tell the server inside how it is reached.
var forwardedHeaders = []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Prefix"}

// ToInside makes the headers of a request on its way in. What is the platform's is removed, and who the caller says it is: how
// the server inside is reached is what forwarded says.
func ToInside(h, forwarded http.Header) {
	DropReserved(h)
	for _, name := range forwardedHeaders {
		delete(h, name)
		if v := forwarded[name]; len(v) > 0 {
			h[name] = v
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil // or Go's own would be sent
	}
}

// DropReserved removes what is the platform's, or looks so.
func DropReserved(h http.Header) {
	for name := range h {
		if strings.HasPrefix(textproto.CanonicalMIMEHeaderKey(name), reserved) {
			delete(h, name)
		}
	}
}

// acting are headers by which an answer changes what a browser does with the whole origin.
var acting = map[string]bool{
	"Set-Cookie": true, "Set-Cookie2": true, "Clear-Site-Data": true, "Strict-Transport-Security": true, "Public-Key-Pins": true,
	"Alt-Svc": true, "Service-Worker-Allowed": true, "Nel": true, "Report-To": true, "Reporting-Endpoints": true,
	"Content-Security-Policy": true, "Content-Security-Policy-Report-Only": true, "X-Content-Type-Options": true, "Refresh": true,
	"Origin-Agent-Cluster": true, "Document-Policy": true, "Permissions-Policy": true,
}

// FromInside makes an answer's headers harmless to who gets it on the platform's own origin. A client that is no browser
// finds what was renamed under Inner.
func FromInside(h http.Header) {
	DropReserved(h)
	for name, values := range h {
		if acting[name] || strings.HasPrefix(name, "Access-Control-") {
			delete(h, name)
			h[Inner+name] = values
		}
	}
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("X-Content-Type-Options", "nosniff")
}

// FromInsideToOwnOrigin is FromInside for an origin that belongs to this one server: what is kept from it is to act on its
// siblings. secret is the name of the platform's own cookie there.
func FromInsideToOwnOrigin(h http.Header, secret string) {
	DropReserved(h)
	cookies := h["Set-Cookie"]
	delete(h, "Set-Cookie")
	for _, c := range cookies {
		if c, ok := ownCookie(c, secret); ok {
			h["Set-Cookie"] = append(h["Set-Cookie"], c)
		}
	}
}

// ownCookie takes the Domain from a cookie, by which it would be sent to other sandboxes' hosts.
func ownCookie(c, secret string) (string, bool) {
	parts := strings.Split(c, ";")
	name, _, _ := strings.Cut(parts[0], "=")
	if strings.EqualFold(strings.TrimSpace(name), secret) {
		return "", false
	}
	kept := parts[:1]
	for _, p := range parts[1:] {
		attribute, _, _ := strings.Cut(p, "=")
		if !strings.EqualFold(strings.TrimSpace(attribute), "domain") {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, ";"), true
}

// IsUpgrade reports whether a request asks for another protocol.
func IsUpgrade(r *http.Request) bool { return Upgrade(r.Header) != "" }

// Upgrade is the protocol that a message's headers change to, "" if none.
func Upgrade(h http.Header) string {
	for _, line := range h["Connection"] {
		for token := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(textproto.TrimString(token), "upgrade") {
				return h.Get("Upgrade")
			}
		}
	}
	return ""
}
