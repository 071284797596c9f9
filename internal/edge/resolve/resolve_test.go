package resolve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"dsec/sandbox"
)

func addrs(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

// zone is what a test's names stand for.
type zone struct {
	mu    sync.Mutex
	names map[string][]netip.Addr
	err   error
	asked atomic.Int64
}

func (z *zone) set(name string, list ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.names[name] = addrs(list...)
}

func (z *zone) fail(err error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.err = err
}

func (z *zone) lookup(_ context.Context, name string) ([]netip.Addr, error) {
	z.asked.Add(1)
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.names[name], z.err
}

func newZone() *zone { return &zone{names: make(map[string][]netip.Addr)} }

func TestAddressesComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := newZone()
		z.set("a.example", "10.0.0.2", "10.0.0.1", "::ffff:10.0.0.1")
		var told atomic.Int64
		r := Open(Options{Lookup: z.lookup, Changed: func([]sandbox.ID) { told.Add(1) }})
		defer r.Close()
		if err := r.Use("s1", []string{"A.Example."}); err != nil {
			t.Fatal(err)
		}
		if err := r.Await(t.Context(), []string{"a.example"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if a := r.Get("a.example"); !slices.Equal(a.Current, addrs("10.0.0.1", "10.0.0.2")) || len(a.Kept) != 0 || !a.Known || told.Load() != 1 {
			t.Errorf("%+v, told %d times", a, told.Load())
		}
		z.set("a.example", "10.0.0.3")
		time.Sleep(31 * time.Second)
		if a := r.Get("a.example"); !slices.Equal(a.Current, addrs("10.0.0.3")) || !slices.Equal(a.Kept, addrs("10.0.0.1", "10.0.0.2")) || told.Load() != 2 {
			t.Errorf("%+v, told %d times", a, told.Load())
		}
		z.set("a.example", "10.0.0.3", "10.0.0.1") // it is back
		time.Sleep(5 * time.Minute)
		if a := r.Get("a.example"); !slices.Equal(a.Current, addrs("10.0.0.1", "10.0.0.3")) || len(a.Kept) != 0 {
			t.Errorf("%+v", a)
		}
		asked := z.asked.Load()
		r.Release("s1")
		time.Sleep(10 * time.Minute)
		if z.asked.Load() != asked || r.Get("a.example").Known || len(r.names) != 0 {
			t.Errorf("a name that nobody uses is still known")
		}
	})
}

// Look-ups that fail are told of and repeated, and what was known stays.
func TestNameServersThatAreAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		z := newZone()
		z.set("a.example", "10.0.0.1")
		r := Open(Options{Lookup: z.lookup})
		defer r.Close()
		r.Use("s1", []string{"a.example", "b.example"})
		r.Await(t.Context(), []string{"a.example", "b.example"})
		if a := r.Get("b.example"); a.Err == nil || !a.Known {
			t.Errorf("a name without an address: %+v", a)
		}
		z.fail(errors.New("away"))
		time.Sleep(2 * time.Hour)
		if a := r.Get("a.example"); a.Err == nil || !slices.Equal(a.Current, addrs("10.0.0.1")) {
			t.Errorf("%+v", a)
		}
		if n := z.asked.Load(); n > 2*250 { // each half minute, no faster
			t.Errorf("asked %d times in two hours", n)
		}
		z.fail(nil)
		z.set("b.example", "10.0.0.9")
		time.Sleep(31 * time.Second)
		if a := r.Get("b.example"); a.Err != nil || len(a.Current) != 1 {
			t.Errorf("%+v", a)
		}
	})
}

func TestWhatNamesStoodForIsFoundAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "names")
		z := newZone()
		z.set("a.example", "10.0.0.1")
		r := Open(Options{Lookup: z.lookup, Path: path})
		r.Use("s1", []string{"a.example"})
		r.Await(t.Context(), []string{"a.example"})
		z.set("a.example", "10.0.0.2")
		time.Sleep(31 * time.Second)
		// Killed: nothing is closed before the next one begins.
		z.fail(errors.New("away"))
		next := Open(Options{Lookup: z.lookup, Path: path})
		if a := next.Get("a.example"); !slices.Equal(a.Current, addrs("10.0.0.2")) || !slices.Equal(a.Kept, addrs("10.0.0.1")) || a.Known {
			t.Errorf("%+v", a)
		}
		r.Close()
		next.Remove()
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%v", err)
		}
		if err := os.WriteFile(path, []byte("{half"), 0o600); err != nil {
			t.Fatal(err)
		}
		Open(Options{Lookup: z.lookup, Path: path}).Close() // damage costs what it says
	})
}

// The end of a request is no end of a look-up, and a look-up that hangs holds up no other.
func TestWaitersLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		var asked atomic.Int64
		r := Open(Options{Lookup: func(ctx context.Context, name string) ([]netip.Addr, error) {
			asked.Add(1)
			if name == "slow.example" {
				select {
				case <-free:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return addrs("10.0.0.1"), nil
		}})
		defer r.Close()
		r.Use("s1", []string{"slow.example", "fast.example"})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Await(ctx, []string{"slow.example"}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if err := r.Await(t.Context(), []string{"fast.example"}); err != nil || !r.Get("fast.example").Known {
			t.Errorf("%v", err)
		}
		close(free)
		synctest.Wait()
		if !r.Get("slow.example").Known || asked.Load() != 2 {
			t.Errorf("%+v; %d look-ups", r.Get("slow.example"), asked.Load())
		}
	})
}

func TestNamesAreBounded(t *testing.T) {
	r := Open(Options{Lookup: newZone().lookup})
	defer r.Close()
	var err error
	for i := 0; i < 20 && err == nil; i++ {
		var names []string
		for j := range 1000 {
			names = append(names, fmt.Sprintf("n%d.s%d.example", j, i))
		}
		err = r.Use(sandbox.ID(fmt.Sprint(i)), names)
	}
	if sandbox.ClassOf(err) != sandbox.ResourceExhausted || len(r.names) > MaxNames {
		t.Errorf("%v with %d names", err, len(r.names))
	}
	if err := r.Use("late", []string{"n1.s1.example"}); err != nil {
		t.Errorf("a name that is there already: %v", err)
	}
	for i := range 20 {
		r.Release(sandbox.ID(fmt.Sprint(i)))
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) { // look-ups that run are not forgotten
		if err = r.Use("last", []string{"new.example"}); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Errorf("after all others have gone: %v", err)
	}
}

// nameServer answers questions for A of one name; what else it is asked it answers with how it is broken.
func nameServer(t *testing.T, answer func(q dnsmessage.Question) (dnsmessage.RCode, netip.Addr)) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			code, addr := answer(q)
			if code == silent {
				continue
			}
			out := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RCode: code, RecursionAvailable: true}, Questions: m.Questions}
			if addr.IsValid() && q.Type == dnsmessage.TypeA {
				out.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, Body: &dnsmessage.AResource{A: addr.As4()}}}
			}
			if b, err := out.Pack(); err == nil {
				c.WriteTo(b, from)
			}
		}
	}()
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

const silent = dnsmessage.RCode(99)

// F1: a server that fails or is silent is not the end; one that says that there is no such name is.
func TestNameServersFailOver(t *testing.T) {
	is := func(code dnsmessage.RCode, addr string) func(dnsmessage.Question) (dnsmessage.RCode, netip.Addr) {
		var a netip.Addr
		if addr != "" {
			a = netip.MustParseAddr(addr)
		}
		return func(dnsmessage.Question) (dnsmessage.RCode, netip.Addr) { return code, a }
	}
	good := is(dnsmessage.RCodeSuccess, "10.3.2.1")
	for what, first := range map[string]func(dnsmessage.Question) (dnsmessage.RCode, netip.Addr){
		"that fails": is(dnsmessage.RCodeServerFailure, ""), "that refuses": is(dnsmessage.RCodeRefused, ""), "that is silent": is(silent, ""),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int64
			broken := nameServer(t, func(q dnsmessage.Question) (dnsmessage.RCode, netip.Addr) { asked.Add(1); return first(q) })
			lookup := Node([]netip.AddrPort{broken, nameServer(t, good)})
			found, err := lookup(t.Context(), "reg.example.org")
			if err != nil || !slices.Equal(found, addrs("10.3.2.1")) || asked.Load() == 0 {
				t.Fatalf("%v, %v; the first was asked %d times", found, err, asked.Load())
			}
			before := asked.Load() // and the next look-up begins with the one that answered
			if _, err := lookup(t.Context(), "other.example.org"); err != nil || asked.Load() != before {
				t.Errorf("%v; asked %d times more", err, asked.Load()-before)
			}
		})
	}
	lookup := Node([]netip.AddrPort{nameServer(t, is(dnsmessage.RCodeNameError, "")), nameServer(t, good)})
	var e *net.DNSError
	if found, err := lookup(t.Context(), "no.example.org"); !errors.As(err, &e) || !e.IsNotFound {
		t.Errorf("a name that does not exist: %v, %v", found, err)
	}
}

func TestParseServers(t *testing.T) {
	got, err := ParseServers([]string{"10.0.0.2", "10.0.0.2:5353", "fd12::1", "[fd12::1]:54"})
	if err != nil || fmt.Sprint(got) != "[10.0.0.2:53 10.0.0.2:5353 [fd12::1]:53 [fd12::1]:54]" {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "dns.example", "10.0.0.2:0", "10.0.0.2:x"} {
		if _, err := ParseServers([]string{bad}); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func FuzzResolvConf(f *testing.F) {
	f.Add("nameserver 10.0.0.1\n# nameserver x\nnameserver fe80::1%eth0 z\n")
	f.Fuzz(func(t *testing.T, text string) {
		if n := len(parseResolvConf(text)); n > strings.Count(text, "nameserver") {
			t.Errorf("%d servers", n)
		}
	})
}
