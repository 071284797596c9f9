package network

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"dsec/internal/edge/network/allow"
	"dsec/internal/linux"
)

//go:generate bpf/generate.sh

// filterObject is bpf/filter.c, compiled.
//
//go:embed bpf/filter.o
var filterObject []byte

// Bounds of the filter, as in filter.c.
const (
	maxLinks   = 16384
	firstLink  = 16 // link n has index n and the n-th address; below are the loopback's index and the gateway's address
	maxRanges  = allow.MaxRanges
	maxSamples = allow.MaxSamples
)

// The filter's structures.
type (
	filterKey4 struct {
		Bits, Policy uint32
		Addr         [4]byte
	}
	filterKey6 struct {
		Bits, Policy uint32
		Addr         [16]byte
	}
	filterBare4 struct {
		Bits uint32
		Addr [4]byte
	}
	filterBare6 struct {
		Bits uint32
		Addr [16]byte
	}
	filterRanges struct {
		Count  uint32
		Ranges [maxRanges]allow.Range
	}
	filterSample struct {
		Addr        [16]byte
		What, _     uint32
		Count, Last uint64
	}
	filterSamples struct {
		Lock, Next uint32
		Samples    [maxSamples]filterSample
	}
	filterCounts [8]uint64
)

// filterReasons are the reasons of filter.c.
var filterReasons = [8]string{1: BadFrame, BadPacket, BadProtocol, Forbidden, NotAllowed}

// A filter is the packet filter, loaded, and its maps, which are pinned below dir. The links hold the programs: all of it outlives
// this process.
type filter struct {
	dir      string
	from, to *ebpf.Program // the sandbox
	maps     filterMaps
}

type filterMaps struct {
	Active     *ebpf.Map `ebpf:"active"`
	Open4      *ebpf.Map `ebpf:"open4"`
	Open6      *ebpf.Map `ebpf:"open6"`
	Forbidden4 *ebpf.Map `ebpf:"forbidden4"`
	Forbidden6 *ebpf.Map `ebpf:"forbidden6"`
	Refused    *ebpf.Map `ebpf:"refused"`
	Sampled    *ebpf.Map `ebpf:"sampled"`
}

func (m *filterMaps) all() []*ebpf.Map {
	return []*ebpf.Map{m.Active, m.Open4, m.Open6, m.Forbidden4, m.Forbidden6, m.Refused, m.Sampled}
}

// loadFilter loads the filter with the maps that are pinned in dir, a directory of bpffs, or makes them.
func loadFilter(dir string, r addressRange) (*filter, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(filterObject))
	if err != nil {
		return nil, fmt.Errorf("read the packet filter: %w", err)
	}
	for name, m := range spec.Maps {
		if name != ".rodata" {
			m.Pinning = ebpf.PinByName
		}
	}
	six := r.six.Addr().As16()
	if err := errors.Join(spec.Variables["base4"].Set(r.base4()),
		spec.Variables["base6"].Set([3]uint32{binary.NativeEndian.Uint32(six[0:]), binary.NativeEndian.Uint32(six[4:]), binary.NativeEndian.Uint32(six[8:])})); err != nil {
		return nil, fmt.Errorf("set up the packet filter: %w", err)
	}
	var o struct {
		From *ebpf.Program `ebpf:"from_sandbox"`
		To   *ebpf.Program `ebpf:"to_sandbox"`
		filterMaps
	}
	if err := spec.LoadAndAssign(&o, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}); err != nil {
		return nil, fmt.Errorf("load the packet filter: %w", err)
	}
	return &filter{dir: dir, from: o.From, to: o.To, maps: o.filterMaps}, nil
}

// isNew reports whether links of an earlier process have, or may have, another version of the filter.
func (f *filter) isNew() bool {
	last, err := os.ReadFile(f.versionFile())
	return err != nil || string(last) != filterVersion()
}

// noteVersion notes that all links have this one.
func (f *filter) noteVersion() error {
	return os.WriteFile(f.versionFile(), []byte(filterVersion()), 0o600)
}

func (f *filter) versionFile() string { return filepath.Join(filepath.Dir(f.dir), "filter") }

func filterVersion() string {
	sum := sha256.Sum256(filterObject)
	return hex.EncodeToString(sum[:])
}

func (f *filter) close() {
	f.from.Close()
	f.to.Close()
	for _, m := range f.maps.all() {
		m.Close()
	}
}

// activate makes a policy that is written the one of a link. One write: a packet sees the old one or the new one.
func (f *filter) activate(n, policy uint32) error {
	if err := f.maps.Active.Put(n, policy); err != nil {
		return fmt.Errorf("activate a network policy: %w", err)
	}
	return nil
}

// write enters the rules of a policy, under a number that no link has yet.
func (f *filter) write(policy uint32, all []allow.Opened) error {
	for _, o := range all {
		v := filterRanges{Count: uint32(len(o.Ranges))}
		copy(v.Ranges[:], o.Ranges)
		m, key := f.key(policy, o.Prefix)
		if err := m.Put(key, &v); err != nil {
			return fmt.Errorf("write a network policy: %w", err)
		}
	}
	return nil
}

// erase removes them, once no link has the number.
func (f *filter) erase(policy uint32, all []allow.Opened) error {
	var errs []error
	for _, o := range all {
		m, key := f.key(policy, o.Prefix)
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("erase a network policy: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (f *filter) key(policy uint32, p netip.Prefix) (*ebpf.Map, any) {
	if p.Addr().Is4() {
		return f.maps.Open4, &filterKey4{32 + uint32(p.Bits()), policy, p.Addr().As4()}
	}
	return f.maps.Open6, &filterKey6{32 + uint32(p.Bits()), policy, p.Addr().As16()}
}

// eraseOthers removes policies of an earlier process: those whose numbers keep does not have.
func (f *filter) eraseOthers(keep func(policy uint32) bool) error {
	four, six, err := f.written()
	errs := []error{err}
	for _, k := range four {
		if !keep(k.Policy) {
			errs = append(errs, f.maps.Open4.Delete(&k))
		}
	}
	for _, k := range six {
		if !keep(k.Policy) {
			errs = append(errs, f.maps.Open6.Delete(&k))
		}
	}
	return errors.Join(errs...)
}

func (f *filter) written() (four []filterKey4, six []filterKey6, err error) {
	var k4 filterKey4
	var k6 filterKey6
	var v filterRanges
	i, j := f.maps.Open4.Iterate(), f.maps.Open6.Iterate()
	for i.Next(&k4, &v) {
		four = append(four, k4)
	}
	for j.Next(&k6, &v) {
		six = append(six, k6)
	}
	return four, six, errors.Join(i.Err(), j.Err())
}

// lastPolicy is the highest number of a policy that is written. One that a link has is.
func (f *filter) lastPolicy() (last uint32, err error) {
	four, six, err := f.written()
	for _, k := range four {
		last = max(last, k.Policy)
	}
	for _, k := range six {
		last = max(last, k.Policy)
	}
	return last, err
}

// forbid opens or closes a prefix to all, whatever their policies say.
func (f *filter) forbid(p netip.Prefix, forbidden bool) error {
	m, key := f.maps.Forbidden6, any(&filterBare6{uint32(p.Bits()), p.Addr().As16()})
	if p.Addr().Is4() {
		m, key = f.maps.Forbidden4, &filterBare4{uint32(p.Bits()), p.Addr().As4()}
	}
	var err error
	if forbidden {
		err = m.Put(key, uint8(1))
	} else if err = m.Delete(key); errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("forbid %s: %w", p, err)
	}
	return nil
}

// begin counts for a link from zero.
func (f *filter) begin(n uint32) error {
	return errors.Join(f.maps.Refused.Put(n, &filterCounts{}), f.maps.Sampled.Put(n, &filterSamples{}))
}

// forget is begin's counterpart.
func (f *filter) forget(n uint32) error {
	err := f.maps.Sampled.Delete(n)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	return errors.Join(err, f.maps.Refused.Put(n, &filterCounts{}))
}

// refusedTo reads what the filter refused to a link.
func (f *filter) refusedTo(n uint32) (Refusals, error) {
	r := Refusals{Reasons: make(map[string]int64)}
	var c filterCounts
	if err := f.maps.Refused.Lookup(n, &c); err != nil {
		return r, fmt.Errorf("read what the packet filter refused: %w", err)
	}
	for i, count := range c {
		if count > 0 {
			r.Packets += int64(count)
			r.Reasons[filterReasons[i]] = int64(count)
		}
	}
	var all filterSamples
	if err := f.maps.Sampled.LookupWithFlags(n, &all, ebpf.LookupLock); errors.Is(err, ebpf.ErrKeyNotExist) {
		return r, nil
	} else if err != nil {
		return r, fmt.Errorf("read samples of the packet filter: %w", err)
	}
	now, mono := time.Now(), linux.Monotonic()
	for _, s := range all.Samples {
		if s.Count == 0 {
			continue
		}
		r.Samples = append(r.Samples, Refusal{
			Destination: netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), uint16(s.What>>16)), Protocol: uint8(s.What >> 8),
			Reason: filterReasons[s.What&7], Count: int64(s.Count), Last: now.Add(time.Duration(s.Last) - mono),
		})
	}
	return r, nil
}
