package inflight

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"dsec/sandbox"
)

func refused(t *testing.T, err error, what string) {
	t.Helper()
	e := sandbox.AsError(err)
	if e == nil || e.Class != sandbox.ResourceExhausted || e.Reason != Reason || e.Facts["what"] != what || !strings.Contains(e.Message, "try again") {
		t.Errorf("%v, want a refusal for %s", err, what)
	}
}

func enter(t *testing.T, c *Counter, project string, k Kind) *Place {
	t.Helper()
	p, err := c.Enter(project, k)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAProjectsBoundsAreItsOwn(t *testing.T) {
	c := New(Limits{Calls: 2, Streams: 3, Bytes: 100})
	call := enter(t, c, "a", Call)
	enter(t, c, "a", Call)
	for range 3 {
		enter(t, c, "a", Stream)
	}
	_, err := c.Enter("a", Call)
	refused(t, err, "calls")
	_, err = c.Enter("a", Stream)
	refused(t, err, "streams")
	for range 8 { // what ends something has room left, and not without end
		enter(t, c, "a", End)
	}
	_, err = c.Enter("a", End)
	refused(t, err, "calls")

	other := enter(t, c, "b", Call)
	enter(t, c, "b", Stream)
	if err := errors.Join(call.Hold(60), call.Hold(40), other.Hold(100)); err != nil {
		t.Fatal(err)
	}
	refused(t, call.Hold(1), "bytes")
	call.Leave()
	call.Leave() // harmless
	if err := call.Hold(1000); err != nil {
		t.Errorf("who has left holds nothing: %v", err)
	}
	_, err = c.Enter("a", Call) // there are too many until those that end something have left, too
	refused(t, err, "calls")
}

// However high its own bound is, a project takes no more than half of what there is for all.
func TestStreamsAreLeftForOthers(t *testing.T) {
	c := New(Limits{Streams: 1000, AllStreams: 10})
	for range 5 {
		enter(t, c, "greedy", Stream)
	}
	_, err := c.Enter("greedy", Stream)
	refused(t, err, "streams")
	var others []*Place
	for range 5 {
		others = append(others, enter(t, c, "modest", Stream))
	}
	_, err = c.Enter("third", Stream)
	refused(t, err, "all_streams")
	others[0].Leave()
	enter(t, c, "third", Stream)
	enter(t, c, "third", Call) // takes no descriptor of its own
}

func TestNothingIsLeftOfThoseWhoLeft(t *testing.T) {
	c := New(Limits{Calls: 50, Streams: 50, AllStreams: 80})
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			for n := range 500 {
				p, err := c.Enter(string(rune('a'+i%7)), Kind(n%3))
				if err != nil {
					continue
				}
				_ = p.Hold(int64(n)) // refused or not
				p.Leave()
			}
		})
	}
	all.Wait()
	if len(c.projects) != 0 || c.streams != 0 {
		t.Errorf("left: %v, %d streams", c.projects, c.streams)
	}
}

func TestDescriptorsAreShared(t *testing.T) {
	for _, most := range []int64{64, 256, 1024, 4096, 1 << 20, 1 << 62} {
		connections, streams := ForDescriptors(most)
		if connections < 1 || streams < 1 || int64(connections)+2*int64(streams) > most {
			t.Errorf("of %d: %d connections, %d streams", most, connections, streams)
		}
	}
}
