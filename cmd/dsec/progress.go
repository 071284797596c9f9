package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// A progress is a line on a terminal that says how much has been sent and how fast. Elsewhere it is silent.
type progress struct {
	to    io.Writer // nil = silent
	total int64     // -1 = unknown
	now   func() time.Time

	mu      sync.Mutex
	started time.Time
	drawn   time.Time
	width   int
}

const redrawEvery = 100 * time.Millisecond

func newProgress(to io.Writer, total int64) *progress {
	if !isTerminal(to) {
		to = nil
	}
	return &progress{to: to, total: total, now: time.Now}
}

// report is called with the bytes sent so far.
func (p *progress) report(n int64) {
	if p.to == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	if p.started.IsZero() {
		p.started = now
	}
	if now.Sub(p.drawn) < redrawEvery {
		return
	}
	p.drawn = now
	text := byteSize(n)
	if p.total > 0 {
		text += fmt.Sprintf(" of %s (%d %%)", byteSize(p.total), n*100/p.total)
	}
	if spent := now.Sub(p.started).Seconds(); spent >= 0.5 {
		text += fmt.Sprintf(", %s/s", byteSize(int64(float64(n)/spent)))
	}
	p.drawLocked("sent " + text)
}

// done removes the line.
func (p *progress) done() {
	if p.to == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.width > 0 {
		p.drawLocked("")
		fmt.Fprint(p.to, "\r")
	}
	p.to = nil
}

func (p *progress) drawLocked(text string) {
	fmt.Fprintf(p.to, "\r%-*s", p.width, text)
	p.width = len(text)
}
