package edge

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"dsec/internal/grant"
)

// deadlines is an answer that notes the bounds of its request's reads.
type deadlines struct {
	*httptest.ResponseRecorder
	mu   sync.Mutex
	list []time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, t)
	return nil
}

func (d *deadlines) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.list)
}

// Input may pause while its command runs, and no longer.
func TestInputWaitsForItsCommand(t *testing.T) {
	for _, end := range []string{"of the command", "of the input"} {
		w := newByteWorld(t)
		w.run("c1", "cat", 0)
		pr, pw := io.Pipe()
		req := httptest.NewRequest("PUT", "/v1/sandboxes/"+string(w.id)+"/commands/c1/stdin", pr)
		req.Header.Set(grant.Header, w.grant("default", grant.RoleUser))
		d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
		done := make(chan struct{})
		go func() { w.e.ByteHandler().ServeHTTP(d, req); close(done) }()
		for range 3 {
			if _, err := pw.Write([]byte("x")); err != nil { // returns when it was read
				t.Fatal(err)
			}
		}
		if n := d.count(); n != 0 {
			t.Errorf("%d bounds on a person who thinks", n)
		}
		if end == "of the command" {
			c, err := w.e.index.byID[w.id].command("c1")
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Kill(t.Context(), 9); err != nil {
				t.Fatal(err)
			}
			eventually(t, "its input is bounded", func() bool { return d.count() == 1 })
		}
		pw.Close()
		<-done
		if n := d.count(); n != 1 || time.Until(d.list[0]) > bodyIdle || d.Code != http.StatusOK {
			t.Errorf("end %s: %d bounds, %d", end, n, d.Code)
		}
	}
}
