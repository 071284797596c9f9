package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	clients   = 8
	serialOps = 200 // execs of a round, one by one
	firstOps  = 40  // creates of a round, one by one
	slowOps   = 5   // the same of docker, which takes a hundred times as long
	warmUps   = 3
)

// A side is one of those that are compared: three operations.
type side struct {
	name    string
	create  func(context.Context) (string, error)
	exec    func(context.Context, string) error
	destroy func(context.Context, string) error
	first   int // operations of a round, one by one
	serial  int
}

// benchAPI measures what a client sees, against docker by its command line and by its HTTP API.
func benchAPI(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	ours := side{"dsec", p.create, p.exec, p.destroy, firstOps, serialOps}
	var theirs []side
	if s.docker {
		d, err := s.startDocker(ctx)
		if err != nil {
			return err
		}
		theirs = []side{
			{"docker CLI", d.createCLI, d.execCLI, d.destroyCLI, slowOps, slowOps},
			{"docker API", d.createAPI, d.execAPI, d.destroyAPI, slowOps, slowOps},
		}
	}
	a := &api{p: p, sides: append([]side{ours}, theirs...), r: r}
	return s.runParts(ctx, part{"exec", a.execs}, part{"create", a.creates}, part{"cycle", a.cycles})
}

type api struct {
	p     *platform
	sides []side // ours is the first
	r     *report
}

// A comparison holds what was measured of each side.
type comparison struct {
	values map[string]samples
	parts  map[string]float64 // CPU of ours, the last round
}

// A round is what one side did in its turn.
type round struct {
	values samples
	parts  map[string]float64
}

// rounds measures all sides in turn, again and again.
func (a *api) rounds(f func(one side) (round, error)) (comparison, error) {
	c := comparison{values: map[string]samples{}}
	for range a.p.s.rounds {
		for i, one := range a.sides {
			r, err := f(one)
			if err != nil {
				return c, fmt.Errorf("%s: %w", one.name, err)
			}
			c.values[one.name] = append(c.values[one.name], r.values...)
			if i == 0 {
				c.parts = r.parts
			}
		}
	}
	return c, nil
}

// metered runs one load, and says how much CPU time passed where for each of its operations.
func (a *api) metered(load func() (values samples, ops int, err error)) (round, error) {
	m, err := a.p.meter()
	if err != nil {
		return round{}, err
	}
	values, ops, err := load()
	if err != nil {
		return round{}, err
	}
	parts, err := m.perOp(ops)
	return round{values, parts}, err
}

// add makes figures of a comparison: ours alone or against each of the others.
func (a *api) add(name, unit, target string, lowerIsBetter bool, c comparison) {
	ours := c.values[a.sides[0].name]
	f := figure{Name: name, Value: ours.median(), Unit: unit, Samples: len(ours), Spread: ours.spread(), Target: target,
		Parts: c.parts, PartUnit: "ms of CPU per operation"}
	if len(a.sides) == 1 {
		a.r.add(f, lowerIsBetter)
	}
	for i, other := range a.sides[1:] {
		theirs := c.values[other.name]
		f.Against, f.Baseline, f.Others = other.name, theirs.median(), theirs.spread()
		if i > 0 {
			f.Name, f.Target, f.Parts = name+"_vs_api", "", nil
		}
		a.r.add(f, lowerIsBetter)
	}
}

// with makes a sandbox for each client of a side while f runs.
func (one side) with(ctx context.Context, f func(ids []string) error) (err error) {
	ids := make([]string, clients)
	err = spread(ctx, clients, clients, func(ctx context.Context, i int) (err error) {
		ids[i], err = one.create(ctx)
		return err
	})
	defer func() {
		ctx := context.WithoutCancel(ctx)
		err = errors.Join(err, spread(ctx, clients, clients, func(ctx context.Context, i int) error {
			if ids[i] == "" {
				return nil
			}
			return one.destroy(ctx, ids[i])
		}))
	}()
	if err != nil {
		return err
	}
	for range warmUps {
		for _, id := range ids {
			if err := one.exec(ctx, id); err != nil {
				return err
			}
		}
	}
	return f(ids)
}

// execs measures /bin/true in sandboxes that are there.
func (a *api) execs(ctx context.Context) error {
	serial, err := a.rounds(func(one side) (r round, err error) {
		return r, one.with(ctx, func(ids []string) error {
			r, err = a.metered(func() (samples, int, error) {
				took, err := oneByOne(ctx, one.serial, func(ctx context.Context) error { return one.exec(ctx, ids[0]) })
				return took, len(took), err
			})
			return err
		})
	})
	if err != nil {
		return err
	}
	a.add("exec_p50", "ms", "<= 3 ms", true, serial)
	at8, err := a.rounds(func(one side) (r round, err error) {
		return r, one.with(ctx, func(ids []string) error {
			r, err = a.metered(func() (samples, int, error) {
				done, err := sustain(ctx, clients, a.p.s.roundTime(), func(ctx context.Context, w int) error { return one.exec(ctx, ids[w]) })
				return samples{done.PerSecond}, done.Ran, err
			})
			return err
		})
	})
	if err != nil {
		return err
	}
	a.add("exec_rate_8", "1/s", ">= 600/s, >= 15x docker exec", false, at8)
	return nil
}

// creates measures the time from a create's request to the result of the first command.
func (a *api) creates(ctx context.Context) error {
	c, err := a.rounds(func(one side) (round, error) {
		return a.metered(func() (samples, int, error) {
			out, err := one.firstResults(ctx)
			return out, len(out), err
		})
	})
	if err != nil {
		return err
	}
	a.add("create_first_result_p50", "ms", "<= 12 ms", true, c)
	return nil
}

func (one side) firstResults(ctx context.Context) (samples, error) {
	var out samples
	for range one.first {
		start := time.Now()
		id, err := one.create(ctx)
		if err != nil {
			return nil, err
		}
		if err := one.exec(ctx, id); err != nil {
			return nil, err
		}
		out = append(out, float64(time.Since(start))/1e6)
		if err := one.destroy(ctx, id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// cycles measures create, exec and destroy by all clients at once.
func (a *api) cycles(ctx context.Context) error {
	return a.cyclesTo(ctx, "cycle_rate_8", ">= 150/s, >= 10x docker")
}

func (a *api) cyclesTo(ctx context.Context, name, target string) error {
	left := &leftovers{of: map[string]side{}}
	c, err := a.rounds(func(one side) (round, error) {
		return a.metered(func() (samples, int, error) {
			done, err := sustain(ctx, clients, a.p.s.roundTime(), func(ctx context.Context, _ int) error { return one.cycle(ctx, left) })
			return samples{done.PerSecond}, done.Ran, err
		})
	})
	if err = errors.Join(err, left.destroy(context.WithoutCancel(ctx))); err != nil {
		return err
	}
	a.add(name, "1/s", target, false, c)
	return nil
}

func (one side) cycle(ctx context.Context, left *leftovers) error {
	id, err := one.create(ctx)
	if err != nil {
		return err
	}
	left.add(id, one)
	if err := one.exec(ctx, id); err != nil {
		return err
	}
	if err := one.destroy(ctx, id); err != nil {
		return err
	}
	left.remove(id)
	return nil
}

// leftovers are what a broken round did not destroy.
type leftovers struct {
	mu sync.Mutex
	of map[string]side
}

func (l *leftovers) add(id string, one side) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[id] = one
}

func (l *leftovers) remove(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.of, id)
}

func (l *leftovers) destroy(ctx context.Context) error {
	var errs []error
	for id, one := range l.of {
		errs = append(errs, one.destroy(ctx, id))
	}
	return errors.Join(errs...)
}
