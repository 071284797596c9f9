package edgetest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	"dsec/internal/grant"
	"dsec/sandbox"
)

// Put places a file that byte routes serve, by sandbox and path.
func (e *Edge) Put(id sandbox.ID, path string, data []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.files[string(id)+path] = data
}

func refuse(w http.ResponseWriter, code int, err error) {
	se := sandbox.AsError(err)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]any{"code": se.Class.String(), "message": se.Message,
		"details": []any{map[string]any{"type": "dsec.v1.ErrorInfo", "debug": map[string]any{"reason": se.Reason}}}})
}

// byteRoutes serves files, and commands' output as the file "/<cmd>/<stream>". GET answers with a trailer.
func (e *Edge) byteRoutes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/sandboxes/{id}/files", func(w http.ResponseWriter, r *http.Request) {
		e.serveFile(w, r, r.PathValue("id")+r.URL.Query().Get("path"))
	})
	mux.HandleFunc("PUT /v1/sandboxes/{id}/files", func(w http.ResponseWriter, r *http.Request) {
		e.takeFile(w, r, r.PathValue("id")+r.URL.Query().Get("path"))
	})
	mux.HandleFunc("GET /v1/sandboxes/{id}/commands/{cmd}/{stream}", func(w http.ResponseWriter, r *http.Request) {
		e.serveFile(w, r, r.PathValue("id")+"/"+r.PathValue("cmd")+"/"+r.PathValue("stream"))
	})
	mux.HandleFunc("PUT /v1/sandboxes/{id}/commands/{cmd}/stdin", func(w http.ResponseWriter, r *http.Request) {
		e.takeFile(w, r, r.PathValue("id")+"/"+r.PathValue("cmd")+"/stdin")
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		e.headers = append(e.headers, r.Header.Clone())
		hook := e.hooks.Bytes
		e.mu.Unlock()
		g, err := e.verify(r.Header.Get(grant.Header))
		if err != nil {
			refuse(w, http.StatusUnauthorized, err)
			return
		}
		if hook != nil {
			hook(w, r)
			return
		}
		id, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/"), "/")
		e.mu.Lock()
		b := e.boxes[sandbox.ID(id)]
		e.mu.Unlock()
		if b == nil || b.sandbox.GetProject() != g.Project {
			refuse(w, http.StatusNotFound, unknown(id))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func (e *Edge) serveFile(w http.ResponseWriter, r *http.Request, name string) {
	e.mu.Lock()
	data, ok := e.files[name]
	e.mu.Unlock()
	if !ok {
		refuse(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "file_not_found", "no such file"))
		return
	}
	w.Header().Set("Dsec-Mode", "0644")
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
}

func (e *Edge) takeFile(w http.ResponseWriter, r *http.Request, name string) {
	data, err := io.ReadAll(r.Body)
	if err != nil { // cut: nothing is written
		return
	}
	sum := sha256.Sum256(data)
	if want := r.Header.Get("Dsec-Sha256"); want != "" && want != hex.EncodeToString(sum[:]) {
		refuse(w, http.StatusBadRequest, sandbox.Errorf(sandbox.InvalidArgument, "digest_mismatch", "the digest differs"))
		return
	}
	e.mu.Lock()
	e.files[name] = data
	e.mu.Unlock()
	w.Header().Set("Trailer", "Dsec-Done")
	w.WriteHeader(http.StatusOK)
	io.WriteString(w, `{}`)
	w.Header().Set("Dsec-Done", "1")
}
