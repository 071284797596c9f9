package edge

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestArchiveRoutes(t *testing.T) {
	w := newByteWorld(t)
	resp, body := w.do(w.request("PUT", "/archive?path=/d&user=u&keep_owners=1&parents=1&no_replace_types=1&now=1", "content"))
	var done archiveAnswer
	if err := json.Unmarshal([]byte(body), &done); err != nil || resp.StatusCode != 200 || done.Entries != 3 || done.Bytes != 7 {
		t.Fatalf("put: %v %d %s", err, resp.StatusCode, body)
	}
	// The fake keeps it under what it was asked.
	name := "{Path:/d User:u KeepOwners:true MakeParents:true NoReplaceTypes:true Now:true}"
	req := w.request("GET", "/archive", "", "TE", "trailers")
	req.URL.RawQuery = "path=" + strings.ReplaceAll(name, " ", "%20")
	resp, body = w.do(req)
	if resp.StatusCode != 200 || body != "content" || resp.Header.Get("Content-Type") != "application/x-tar" {
		t.Errorf("get: %d %q", resp.StatusCode, body)
	}
	if err := json.Unmarshal([]byte(resp.Trailer.Get(trailerArchive)), &done); err != nil || done.Entries != 1 || done.Skipped != 2 || resp.Trailer.Get(trailerError) != "" {
		t.Errorf("trailers: %v, %v", resp.Trailer, err)
	}
	for path, want := range map[string]string{
		"/archive": "invalid_path", "/archive?path=/x&content=maybe": "invalid_query", "/archive?path=/none": "file_not_found",
	} {
		if resp, body := w.do(w.request("GET", path, "")); resp.StatusCode < 400 || !strings.Contains(body, want) {
			t.Errorf("GET %s: %d %s", path, resp.StatusCode, body)
		}
	}
	for _, query := range []string{"keep_owners=2", "parents=x", "no_replace_types=-", "now=maybe"} {
		if resp, body := w.do(w.request("PUT", "/archive?path=/d&"+query, "")); resp.StatusCode != 400 || !strings.Contains(body, "invalid_query") {
			t.Errorf("PUT with %s: %d %s", query, resp.StatusCode, body)
		}
	}
}

func TestArchiveOfNames(t *testing.T) {
	w := newByteWorld(t)
	for _, name := range []string{"/a", "/b"} {
		if resp, body := w.do(w.request("PUT", "/files?path="+name, "content of "+name)); resp.StatusCode != 200 {
			t.Fatal(body)
		}
	}
	for _, list := range []string{"/a\x00/b\x00", "/a\x00/b"} {
		if resp, body := w.do(w.request("POST", "/archive", list)); resp.StatusCode != 200 || body != "content of /acontent of /b" {
			t.Errorf("%q: %d %s", list, resp.StatusCode, body)
		}
	}
	for list, want := range map[string]string{
		"": "invalid_path", "\x00": "invalid_path", "/a\x00\x00/b": "invalid_path", strings.Repeat("x", 5000): "invalid_path",
		strings.Repeat(strings.Repeat("a", 99)+"\x00", maxNames/100+1): "request_too_large", strings.Repeat("a\x00", maxNameCount+1): "request_too_large",
	} {
		if resp, body := w.do(w.request("POST", "/archive", list)); resp.StatusCode < 400 || !strings.Contains(body, want) {
			t.Errorf("%.20q: %d %s", list, resp.StatusCode, body)
		}
	}
}

// What is wrong with an archive comes in a trailer, or cuts the connection.
func TestArchiveThatGoesWrong(t *testing.T) {
	w := newByteWorld(t)
	for name, reason := range map[string]string{"/short": "file_changed", "/cut": "guest_died"} {
		if resp, body := w.do(w.request("PUT", "/files?path="+name, "content")); resp.StatusCode != 200 {
			t.Fatal(body)
		}
		resp, body := w.do(w.request("GET", "/archive?path="+name, "", "TE", "trailers"))
		var told connectError
		text := resp.Trailer.Get(trailerError)
		if err := json.Unmarshal([]byte(text), &told); err != nil || len(told.Details) != 1 || !strings.Contains(string(told.Details[0].Debug), reason) || body != "content" {
			t.Errorf("%s: %q, trailers %v", name, body, resp.Trailer)
		}
		if strings.ContainsFunc(text, func(c rune) bool { return c > 0x7e }) {
			t.Errorf("%s: a header of %q", name, text)
		}
		if name == "/short" && told.Message != "füle \U0001F600 became shorter" {
			t.Errorf("%s: %q", name, told.Message)
		}
		resp, err := http.DefaultClient.Do(w.request("GET", "/archive?path="+name, ""))
		if err == nil {
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
		}
		if err == nil {
			t.Errorf("%s: no error without trailers", name)
		}
	}
}
