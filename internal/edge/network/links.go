package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

// hostEvery is how often the host's own addresses are looked at. The relay asks the kernel for each connection besides.
const hostEvery = 10 * time.Second

// needLinks makes links possible, or says why they are not.
func (s *Slots) needLinks() error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	switch {
	case closed:
		return sandbox.Errorf(sandbox.Unavailable, "shutting_down", "the edge is shutting down")
	case s.router.Load() != nil:
		return s.relay.need()
	case len(s.relay.command) == 0:
		return sandbox.Errorf(sandbox.Unsupported, "network_unavailable", "this node opens no network to sandboxes")
	}
	s.routerMu.Lock()
	defer s.routerMu.Unlock()
	if s.router.Load() == nil {
		r, err := s.openRouter()
		if err != nil {
			s.log.Error("cannot make the router of sandboxes' network", "error", err)
			return sandbox.Errorf(sandbox.FailedPrecondition, "network_unavailable", "this node cannot open a network to sandboxes: %v", err)
		}
		s.router.Store(r)
	}
	s.mu.Lock()
	s.wantLinks = true
	s.mu.Unlock()
	return s.relay.need()
}

func (s *Slots) linkRecord(n uint32) string {
	return filepath.Join(s.linksDir(), strconv.FormatUint(uint64(n), 10))
}

func (s *Slots) policyRecord(n uint32) string {
	return filepath.Join(s.policyDir(), strconv.FormatUint(uint64(n), 10))
}

// addLink connects a slot with the router. Until it is complete its record says that it is not.
func (s *Slots) addLink(x *slot) error {
	r := s.router.Load()
	record := ""
	n, err := r.addLink(s.path(x.n), func(n uint32) error {
		last := record
		record = s.linkRecord(n)
		err := os.Symlink(strconv.Itoa(x.n), record+".new")
		if last != "" {
			err = errors.Join(err, os.Remove(last+".new"))
		}
		return err
	})
	if err == nil {
		err = os.Rename(record+".new", record)
	}
	if err != nil {
		if record != "" {
			_ = os.Remove(record + ".new")
		}
		return fmt.Errorf("make a link to the outside: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x.link = n
	return nil
}

// SetPolicy replaces the policy of id. Once begun it is carried out, whatever becomes of ctx.
func (s *Slots) SetPolicy(ctx context.Context, id sandbox.ID, p Policy) error {
	return s.setPolicy(ctx, id, p, false)
}

func (s *Slots) setPolicy(ctx context.Context, id sandbox.ID, p Policy, fresh bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	rules, err := p.Compile()
	if err != nil {
		return err
	}
	if len(p.Open) == 0 {
		rules = nil
	} else if err := s.needLinks(); err != nil {
		return err
	}
	x := s.ofID(id)
	if x == nil {
		return sandbox.Errorf(sandbox.NotFound, "not_found", "sandbox %s has no network slot", id)
	}
	x.change.Lock()
	defer x.change.Unlock()
	if s.ofID(id) != x {
		return sandbox.Errorf(sandbox.NotFound, "not_found", "sandbox %s has no network slot", id)
	}
	if x.link == 0 {
		if len(p.Open) == 0 {
			return nil
		}
		if err := s.addLink(x); err != nil {
			return err
		}
	}
	if err := s.recordPolicy(x.link, p); err != nil {
		return err
	}
	s.mu.Lock()
	x.policy = p
	s.mu.Unlock()
	// The relay first: what it closes is reset, and what it opens nobody can ask for yet. Whatever it says, the filter follows.
	relayed := s.relay.set(x, p, fresh)
	return errors.Join(relayed, s.router.Load().setPolicy(x, rules))
}

// recordPolicy keeps a policy for the next process, and for a relay that has to be started again.
func (s *Slots) recordPolicy(n uint32, p Policy) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	path := s.policyRecord(n)
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return fmt.Errorf("record a network policy: %w", err)
	}
	return os.Rename(path+".new", path)
}

// closeLink ends all that a slot has to do with the outside. The link stays.
func (s *Slots) closeLink(x *slot) error {
	r := s.router.Load()
	if x.link == 0 || r == nil {
		return nil
	}
	if err := r.setPolicy(x, nil); err != nil {
		return err
	}
	s.mu.Lock()
	x.policy = Policy{} // first: a relay that is started meanwhile must not be told of it
	s.mu.Unlock()
	s.relay.drop(x.link)
	if err := os.Remove(s.policyRecord(x.link)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return r.filter.begin(x.link)
}

// forgetLink gives the number of a link back whose slot is gone.
func (s *Slots) forgetLink(x *slot) error {
	r := s.router.Load()
	if x.link == 0 || r == nil {
		return nil
	}
	if err := r.filter.forget(x.link); err != nil {
		return err
	}
	if err := os.Remove(s.linkRecord(x.link)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	r.giveNumber(x.link)
	return nil
}

// Refused is what the filter and the relay refused to id since it has its slot.
func (s *Slots) Refused(id sandbox.ID) (Refusals, error) {
	x, r := s.ofID(id), s.router.Load()
	if x == nil || r == nil {
		return Refusals{}, nil
	}
	s.mu.Lock()
	link := x.link
	s.mu.Unlock()
	if link == 0 {
		return Refusals{}, nil
	}
	f, err := r.filter.refusedTo(link)
	if err != nil {
		return Refusals{}, err
	}
	relayed, err := s.relay.refused(link)
	if err != nil {
		s.log.Warn("the relay does not say what it refused", "error", err)
	}
	f.Connections = relayed.Connections
	f.Packets += relayed.Packets
	for reason, n := range relayed.Reasons {
		f.Reasons[reason] += n
	}
	f.Samples = append(f.Samples, relayed.Samples...)
	slices.SortFunc(f.Samples, func(a, b Refusal) int { return b.Last.Compare(a.Last) })
	f.Samples = f.Samples[:min(len(f.Samples), maxSamples)]
	return f, nil
}

// watchHost keeps the host's own addresses closed, whatever it gets.
func (s *Slots) watchHost(ctx context.Context) {
	for {
		wait(ctx, hostEvery)
		if ctx.Err() != nil {
			return
		}
		if r := s.router.Load(); r != nil {
			if err := r.refreshForbidden(); err != nil {
				s.log.Warn("cannot close the host's addresses to sandboxes", "error", err)
			}
		}
	}
}

// adoptLinks finds router and links of an earlier process. It returns which slots have, or may have, a link.
func (s *Slots) adoptLinks(mounted map[string]bool) (linked map[int]bool, err error) {
	entries, err := os.ReadDir(s.linksDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	mounts, err := mountinfo.Self()
	if err != nil {
		return nil, err
	}
	if _, ok := mountinfo.At(mounts, s.routerPath()); !ok { // killed while it was made
		err := s.closeRouter(context.Background())
		s.relay.reopen()
		return nil, err
	}
	r, err := s.openRouter()
	if err != nil {
		return nil, err
	}
	s.router.Store(r)
	owners := make(map[int]*slot)
	for _, x := range s.owned {
		owners[x.n] = x
	}
	linked = make(map[int]bool)
	renew := r.filter.isNew()
	for _, e := range entries {
		if err := s.adoptLink(e.Name(), owners, linked, renew); err != nil {
			return nil, err
		}
	}
	if err := r.filter.noteVersion(); err != nil {
		return nil, err
	}
	used := make(map[uint32]bool)
	for _, x := range s.owned {
		if x.link != 0 {
			used[x.link] = true
		}
	}
	r.numbers.adopt(used)
	if err := r.filter.eraseOthers(func(policy uint32) bool { return r.policies.byID[policy] != nil }); err != nil {
		return nil, err
	}
	return linked, s.relay.find()
}

// adoptLink gives a link back to the slot that it leads to, if somebody owns that; else it is on its way out.
func (s *Slots) adoptLink(name string, owners map[int]*slot, linked map[int]bool, renew bool) error {
	r, path := s.router.Load(), filepath.Join(s.linksDir(), name)
	base, half := strings.CutSuffix(name, ".new")
	number, err := strconv.ParseUint(base, 10, 32)
	target, _ := os.Readlink(path)
	n, bad := parseNumber(target)
	if err != nil || bad != nil || number < firstLink || number >= maxLinks {
		s.log.Warn("removing a broken record of a link", "name", name, "target", target)
		return os.Remove(path)
	}
	link := uint32(number)
	x := owners[n]
	if x == nil || half {
		linked[n] = x == nil
		if x != nil {
			if err := r.disconnect(link); err != nil {
				return err
			}
		}
		if err := errors.Join(r.filter.activate(link, 0), r.filter.forget(link)); err != nil {
			return err
		}
		if err := os.Remove(s.policyRecord(link)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return os.Remove(path)
	}
	linked[n], x.link = true, link
	if renew {
		var b linux.NetlinkBatch
		b.SetFilters(int(link), r.filter.from.FD(), r.filter.to.FD())
		if err := r.nl.Do(&b); err != nil {
			return err
		}
	}
	return s.adoptPolicy(x)
}

// adoptPolicy makes the recorded policy of a link the one in force. Where there is none, the link is closed.
func (s *Slots) adoptPolicy(x *slot) error {
	r := s.router.Load()
	b, err := os.ReadFile(s.policyRecord(x.link))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var p Policy
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	rules, bad := p.Compile()
	if err != nil || bad != nil || len(p.Open) == 0 {
		p, rules = Policy{}, nil
	}
	x.policy = p
	return r.setPolicy(x, rules)
}

// closeRouter ends the relay and removes the router. There may be none.
func (s *Slots) closeRouter(ctx context.Context) error {
	err := s.relay.stop(ctx)
	if r := s.router.Swap(nil); r != nil {
		r.detach()
	}
	return errors.Join(err, s.removeRouter())
}
