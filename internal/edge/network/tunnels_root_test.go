//go:build rootful

package network

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// With some modules loaded, every new namespace has tunnels, whose indices are the lowest.
func TestLinksWhereNamespacesBeginWithInterfaces(t *testing.T) {
	x := newSite(t)
	x.serve(t, 8080, echo)
	s := openLinked(t, privateDir(t), 0)
	defer closeSlots(t, s)
	p := Policy{Open: []Destination{x.dest(8080, TCP)}}
	begin := func(index int) (sandbox.ID, string) {
		id := sandbox.NewID(edge)
		ns := acquire(t, s, id)
		f, err := os.Open(ns)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		inside(t, ns, func() error {
			nl, err := linux.OpenNetlink()
			if err != nil {
				return err
			}
			defer nl.Close()
			var b linux.NetlinkBatch
			b.AddVeth(linux.Veth{Name: "tunl0", PeerName: "gre0", Index: index, PeerIndex: index + 1, MAC: [6]byte{2}, MTU: 1500, PeerNamespace: f})
			return nl.Do(&b)
		})
		return id, ns
	}
	id, ns := begin(2)
	if err := s.SetPolicy(t.Context(), id, p); err != nil {
		t.Fatal(err)
	}
	c, err := dial(ns, "tcp", fmt.Sprintf("%s:8080", x.addr))
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(t, c, "beside tunnels")
	c.Close()
	release(t, s, id)
	id, _ = begin(peerIndex)
	within(t, time.Minute, "a link whose place is taken", func() {
		if err := s.SetPolicy(t.Context(), id, p); !errors.Is(err, syscall.EEXIST) && !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%v", err)
		}
	})
	release(t, s, id)
}
