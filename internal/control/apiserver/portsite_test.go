package apiserver

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func TestParsePortSite(t *testing.T) {
	for in, want := range map[string]PortSite{
		"localhost":                     {"http", "localhost", 7070},
		"Ports.Example.com.":            {"http", "ports.example.com", 7070},
		"https://ports.example.com":     {"https", "ports.example.com", 0},
		"http://ports.example.com:8080": {"http", "ports.example.com", 8080},
	} {
		if got, err := ParsePortSite(in, 7070); err != nil || got != want {
			t.Errorf("%s: %+v %v", in, got, err)
		}
	}
	for _, in := range []string{"", "ftp://x", "a/b", "x:0", "127.0.0.1", "a b", "http://", "x?y", "u@x", "[::1]"} {
		if got, err := ParsePortSite(in, 7070); err == nil {
			t.Errorf("%q: %+v", in, got)
		}
	}
}

func TestMatch(t *testing.T) {
	p := PortSite{"http", "localhost", 7070}
	for host, want := range map[string]string{
		"80-x.localhost:7070": "80-x", "80-X.LocalHost.": "80-x", "a.b.localhost": "a.b", ".localhost": "",
	} {
		if label, ok := p.match(host); !ok || label != want {
			t.Errorf("%s: %q %v", host, label, ok)
		}
	}
	for _, host := range []string{"localhost:7070", "127.0.0.1:7070", "xlocalhost", "localhost.evil.com", ""} {
		if label, ok := p.match(host); ok {
			t.Errorf("%s: %q", host, label)
		}
	}
	if _, ok := (PortSite{}).match("x.localhost"); ok {
		t.Error("no domain, and a match")
	}
	id := sandbox.NewID("eaaaa")
	if u := (PortSite{"https", "p.example", 443}).url(id, 80, "t"); u != "https://80-"+string(id)+".p.example/?dsec_token=t" {
		t.Error(u)
	}
}

func TestWithoutToken(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "dsec_token=x": "", "a=%2F&dsec_token=x&b": "a=%2F&b", "%64sec_token=x": "", "a=dsec_token": "a=dsec_token",
	} {
		if got, _ := withoutToken(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestConceal(t *testing.T) {
	s := &Server{o: Options{PortSite: PortSite{"http", "localhost", 1}}}
	r := httptest.NewRequest("GET", "/", nil)
	r.Header = http.Header{
		"Cookie": {"a=1; dsec_port=secret", " dsec_port =x;b=2"}, "Referer": {"http://h/?dsec_token=x"},
		"Authorization": {"Bearer dsec_" + strings.Repeat("0", 64)}, "Dsec-Authorization": {"x"},
	}
	s.conceal(r)
	if len(r.Header) != 1 || r.Header.Get("Cookie") != "a=1; b=2" {
		t.Errorf("%v", r.Header)
	}
}

func TestSameOrigin(t *testing.T) {
	for name, c := range map[string]struct {
		method, origin, site, mode string
		ok                         bool
	}{
		"no browser":     {"POST", "", "", "", true},
		"own":            {"POST", "http://80-x.localhost:1", "same-origin", "cors", true},
		"other host":     {"GET", "http://81-x.localhost:1", "", "", false},
		"no origin":      {"GET", "null", "", "", false},
		"link":           {"GET", "", "cross-site", "navigate", true},
		"form":           {"POST", "", "cross-site", "navigate", false},
		"image":          {"GET", "", "same-site", "no-cors", false},
		"typed":          {"GET", "", "none", "navigate", true},
		"own, no header": {"GET", "", "same-origin", "no-cors", true},
	} {
		r := httptest.NewRequest(c.method, "http://80-x.localhost:1/", nil)
		for k, v := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site, "Sec-Fetch-Mode": c.mode} {
			if v != "" {
				r.Header.Set(k, v)
			}
		}
		if err := sameOrigin(r); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCredentials(t *testing.T) {
	key := "Bearer dsec_" + strings.Repeat("0", 64)
	const inside = "/v1/sandboxes/s/ports/80/http/x"
	for name, c := range map[string]struct{ path, authorization, own, key, left string }{
		"plain":          {"/v1/x", key, "", key, ""},
		"inside":         {inside, key, "", key, ""},
		"both":           {inside, "Basic abc", key, key, "Basic abc"},
		"the key twice":  {inside, key, key, key, ""},
		"not for others": {"/v1/x", "Basic abc", key, "Basic abc", ""},
	} {
		r := httptest.NewRequest("GET", c.path, nil)
		r.Header.Set("Authorization", c.authorization)
		if c.own != "" {
			r.Header.Set("Dsec-Authorization", c.own)
		}
		if got := credentials(r); got != c.key || r.Header.Get("Authorization") != c.left || r.Header.Get("Dsec-Authorization") != "" {
			t.Errorf("%s: %q, %v", name, got, r.Header)
		}
	}
}

// The statuses of byte routes and of pages are those that Connect has for the same error.
func TestStatusOfEveryClass(t *testing.T) {
	for class := sandbox.Internal; class <= sandbox.DataLoss; class++ {
		x := &exchange{ResponseWriter: httptest.NewRecorder()}
		r := httptest.NewRequest("GET", "/", nil)
		x.fail(r, sandbox.Errorf(class, "x", "x"))
		if x.code != grpcerr.HTTPStatus(class) {
			t.Errorf("%v: %d, Connect says %d", class, grpcerr.HTTPStatus(class), x.code)
		}
		page := &exchange{ResponseWriter: httptest.NewRecorder()}
		r.Header.Set("Accept", "text/html")
		page.page(r, sandbox.Errorf(class, "x", "x"))
		if page.code != x.code {
			t.Errorf("%v: a page with %d, else %d", class, page.code, x.code)
		}
	}
}
