package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

var statsCommand = command{
	name: "stats", group: groupSandboxes, args: "[SANDBOX...]",
	summary: "show what sandboxes use, live",
	details: `Without SANDBOX all that are ready. CPU is in percent of one core, of the time since the line before; memory is with what the kernel has
cached for the sandbox. Ends with Ctrl-C, and when all have ended. With --json each measurement is one line, as the API gives it.

  dsec stats
  dsec stats --no-stream s4k2
  dsec stats --json s4k2 | jq -r .memoryBytes`,
	setup: setupStats,
}

type statsOptions struct {
	noStream, asJSON, noTrunc bool
	interval                  period
	context                   *string
}

func setupStats(f *flagSet) action {
	o := &statsOptions{context: contextFlag(f), interval: period(time.Second)}
	f.BoolVar(&o.noStream, "no-stream", false, "measure once")
	f.Var(&o.interval, "interval", "measure each `DURATION`, at least 100ms")
	f.BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten ids")
	jsonFlag(f, &o.asJSON, "print one line of JSON for each measurement")
	return o.run
}

func (o *statsOptions) run(ctx context.Context, c *console, args []string) error {
	if time.Duration(o.interval) < 100*time.Millisecond {
		return usagef("--interval must be at least 100ms")
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	var sandboxes []*client.Sandbox
	if len(args) == 0 {
		for s, err := range cl.List(ctx, nil, dsecv1.State_STATE_READY) {
			if err != nil {
				return err
			}
			sandboxes = append(sandboxes, cl.Sandbox(s.GetId()))
		}
	}
	for _, ref := range args {
		sb, err := resolve(ctx, cl, ref)
		if err != nil {
			return err
		}
		sandboxes = append(sandboxes, sb)
	}
	v := &statsView{console: c, o: o, last: make(map[string]*dsecv1.Metrics), now: make(map[string]*dsecv1.Metrics)}
	for _, sb := range sandboxes {
		v.ids = append(v.ids, sb.ID)
	}
	if o.noStream {
		return v.once(ctx, sandboxes)
	}
	return v.stream(ctx, sandboxes)
}

// A statsView is the table of measurements.
type statsView struct {
	*console
	o     *statsOptions
	ids   []string
	lines int // that were drawn

	mu    sync.Mutex
	last  map[string]*dsecv1.Metrics // the ones before
	now   map[string]*dsecv1.Metrics
	ended []string
}

// once prints one table, for which it measures twice: a share of a processor is of a time.
func (v *statsView) once(ctx context.Context, sandboxes []*client.Sandbox) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for _, sb := range sandboxes {
		g.Go(func() error {
			n := 0
			for m, err := range sb.WatchMetrics(gctx, time.Duration(v.o.interval)) {
				if err != nil {
					return err
				}
				v.take(sb.ID, m)
				if n++; n == 2 || v.o.asJSON {
					break
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return v.print(false)
}

// stream draws the table anew with each round of measurements.
func (v *statsView) stream(ctx context.Context, sandboxes []*client.Sandbox) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	changed := make(chan struct{}, 1)
	for _, sb := range sandboxes {
		g.Go(func() error {
			for m, err := range sb.WatchMetrics(gctx, time.Duration(v.o.interval)) {
				if err != nil {
					return v.endOne(gctx, sb.ID, err)
				}
				if v.o.asJSON {
					if err := v.line(m); err != nil {
						return err
					}
					continue
				}
				v.take(sb.ID, m)
				signalTo(changed)
			}
			return v.endOne(gctx, sb.ID, nil)
		})
	}
	drawn := make(chan error, 1)
	go func() { drawn <- v.draw(gctx, changed) }()
	err := g.Wait()
	cancel()
	derr := <-drawn
	if err == nil {
		err = derr
	}
	return err
}

// draw prints the table once a change, not more often than each tenth of a second.
func (v *statsView) draw(ctx context.Context, changed <-chan struct{}) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		if err := v.print(true); err != nil {
			return err
		}
		if v.pause(ctx, 100*time.Millisecond) != nil {
			return nil
		}
	}
}

// endOne leaves a sandbox out that has ended, or of which nothing can be learned.
func (v *statsView) endOne(ctx context.Context, id string, err error) error {
	if err != nil && (ctx.Err() != nil || concernsAll(ctx, err)) {
		return err
	}
	if err != nil {
		v.sayError(err, v.o.asJSON)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ended = append(v.ended, id)
	return nil
}

func (v *statsView) take(id string, m *dsecv1.Metrics) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.last[id], v.now[id] = v.now[id], m
}

func (v *statsView) line(m *dsecv1.Metrics) error {
	v.mu.Lock() // lines of several sandboxes stay whole
	defer v.mu.Unlock()
	return v.printJSON(m)
}

// print prints the table, over the one before if that is wanted and standard output is a terminal.
func (v *statsView) print(over bool) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	t := newTable("ID", "CPU", "MEMORY", "LIMIT", "DISK", "PIDS", "NET RX", "NET TX", "OOM KILLS")
	rows := 1
	for _, id := range v.ids {
		m := v.now[id]
		if m == nil || slices.Contains(v.ended, id) {
			continue
		}
		if v.o.asJSON {
			if err := v.printJSON(m); err != nil {
				return err
			}
			continue
		}
		t.row(v.cells(id, m)...)
		rows++
	}
	if v.o.asJSON {
		return nil
	}
	if over && isTerminal(v.stdout) {
		if v.lines > 0 {
			if err := v.console.print("\x1b[%dA\x1b[J", v.lines); err != nil {
				return err
			}
		}
		v.lines = rows
	}
	return t.print(v.console)
}

func (v *statsView) cells(id string, m *dsecv1.Metrics) []string {
	if !v.o.noTrunc {
		id = shortID(id)
	}
	known := func(field, text string) string {
		if slices.Contains(m.GetUnavailable(), field) {
			return "-"
		}
		return text
	}
	return []string{
		id, known("cpu_seconds", cpuShare(v.last[m.GetSandboxId()], m)),
		known("memory_bytes", byteSize(m.GetMemoryBytes())), known("memory_limit_bytes", byteSize(m.GetMemoryLimitBytes())),
		known("disk_bytes", byteSize(m.GetDiskBytes())), known("pids", fmt.Sprint(m.GetPids())),
		known("network_rx_bytes", byteSize(m.GetNetworkRxBytes())), known("network_tx_bytes", byteSize(m.GetNetworkTxBytes())),
		known("oom_kills", fmt.Sprint(m.GetOomKills())),
	}
}

// cpuShare is how much of one core was used between two measurements.
func cpuShare(before, now *dsecv1.Metrics) string {
	spent := now.GetAt().AsTime().Sub(before.GetAt().AsTime()).Seconds()
	if before == nil || spent <= 0 || now.GetCpuSeconds() < before.GetCpuSeconds() {
		return "-"
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", 100*(now.GetCpuSeconds()-before.GetCpuSeconds())/spent), ".0") + "%"
}
