package edge

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"unicode/utf16"

	"dsec/sandbox"
)

// Trailers of an archive's answer, for who asks for trailers ("TE: trailers"): how it went is known at its end.
const (
	trailerArchive = "Dsec-Archive" // what it holds, as JSON
	trailerError   = "Dsec-Error"   // what is wrong with it: a Connect error
)

// An archiveAnswer is what an archive's end tells, as JSON.
type archiveAnswer struct {
	Entries    int64 `json:"entries"`
	Bytes      int64 `json:"bytes"`
	Skipped    int64 `json:"skipped"`
	Changed    int64 `json:"changed,omitempty"`
	SplitLinks int64 `json:"split_links,omitempty"`
}

func answerOf(r ArchiveResult) archiveAnswer {
	return archiveAnswer{r.Entries, r.Bytes, r.Skipped, r.Changed, r.SplitLinks}
}

// userOf is with whose rights a request for files is carried out: the sandbox's user, unless it names one.
func (in *instance) userOf(asked string) string {
	setDefault(&asked, in.intent.Spec.User)
	return asked
}

// getArchive packs a tree.
func (e *Edge) getArchive(w http.ResponseWriter, r *http.Request, in *instance) error {
	a := ArchiveRead{User: in.userOf(r.URL.Query().Get("user"))}
	var err error
	if a.Path, err = pathOf(r); err != nil {
		return err
	}
	if err := queryBools(r, map[string]*bool{"content": &a.Content, "follow": &a.Follow}); err != nil {
		return err
	}
	return e.answerArchive(w, r, in, a)
}

// Bounds of a list of names: bytes, and how many. Each costs aether, which has little memory, more than its bytes.
const (
	maxNames     = 2 << 20
	maxNameCount = 50_000
)

// postArchive packs the regular files whose names, each ended by a NUL, are the request's body.
func (e *Edge) postArchive(w http.ResponseWriter, r *http.Request, in *instance) error {
	list, err := io.ReadAll(io.LimitReader(&steady{rc: http.NewResponseController(w), r: r.Body}, maxNames+1))
	switch {
	case err != nil:
		return sandbox.Errorf(sandbox.Canceled, "canceled", "the list of names broke off").WithCause(err)
	case len(list) > maxNames || bytes.Count(list, []byte{0}) > maxNameCount:
		return sandbox.Errorf(sandbox.ResourceExhausted, "request_too_large", "a list has at most %d names, and %d bytes; ask in several requests", maxNameCount, maxNames)
	}
	names := bytes.Split(bytes.TrimSuffix(list, []byte{0}), []byte{0})
	for _, name := range names {
		if len(name) == 0 || len(name) >= maxPathBytes {
			return sandbox.Errorf(sandbox.InvalidArgument, "invalid_path", "each of the names, which end by a NUL, has 1 to %d bytes", maxPathBytes-1)
		}
	}
	return e.answerArchive(w, r, in, ArchiveRead{Path: "/", User: in.userOf(r.URL.Query().Get("user")), Names: names})
}

// answerArchive sends an archive. What goes wrong after the answer has begun is told in a trailer, or, if the client wants
// none, by cutting the connection, so that nobody takes what they have for the whole.
func (e *Edge) answerArchive(w http.ResponseWriter, r *http.Request, in *instance, a ArchiveRead) error {
	g, err := in.live()
	if err != nil {
		return err
	}
	body, err := g.ReadArchive(r.Context(), a)
	if err != nil {
		return err
	}
	defer body.Close()
	trailers := wantsTrailers(r)
	h := w.Header()
	h.Set("Content-Type", "application/x-tar")
	if trailers {
		h.Set("Trailer", trailerArchive+", "+trailerError)
	}
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	result, err := sendArchive(&steady{rc: http.NewResponseController(w), w: w}, body)
	if err == nil && result.Problem != nil {
		err = result.Problem
	}
	if err != nil && !trailers {
		return errStarted{err}
	}
	if err != nil {
		_ = e.seen(r.Context(), r.Pattern, err)
		h.Set(trailerError, asciiJSON(errorBody(about(in.id, err))))
	}
	h.Set(trailerArchive, asciiJSON(answerOf(result)))
	return nil
}

func sendArchive(w io.Writer, body GuestArchive) (ArchiveResult, error) {
	if err := copyBody(w, body); err != nil {
		return ArchiveResult{}, err
	}
	return body.Result()
}

func wantsTrailers(r *http.Request) bool {
	for _, v := range r.Header["Te"] {
		if strings.Contains(v, "trailers") {
			return true
		}
	}
	return false
}

// asciiJSON is JSON for a header.
func asciiJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return "{}" // plain structs always encode
	}
	var out strings.Builder
	for _, c := range string(b) {
		if c < 0x80 {
			out.WriteRune(c)
			continue
		}
		const hex = "0123456789abcdef"
		for _, u := range utf16.AppendRune(nil, c) {
			out.WriteString(`\u`)
			for shift := 12; shift >= 0; shift -= 4 {
				out.WriteByte(hex[u>>shift&15])
			}
		}
	}
	return out.String()
}

// putArchive unpacks an archive below a directory. What was unpacked before an error stays.
func (e *Edge) putArchive(w http.ResponseWriter, r *http.Request, in *instance) error {
	g, err := in.live()
	if err != nil {
		return err
	}
	a, err := archiveWriteOf(r, in)
	if err != nil {
		return err
	}
	result, err := g.WriteArchive(r.Context(), a, &steady{rc: http.NewResponseController(w), r: r.Body})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, answerOf(result))
	return nil
}

func archiveWriteOf(r *http.Request, in *instance) (a ArchiveWrite, err error) {
	a.User = in.userOf(r.URL.Query().Get("user"))
	if a.Path, err = pathOf(r); err != nil {
		return a, err
	}
	return a, queryBools(r, map[string]*bool{
		"keep_owners": &a.KeepOwners, "parents": &a.MakeParents, "no_replace_types": &a.NoReplaceTypes, "now": &a.Now,
	})
}
