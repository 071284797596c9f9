package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"dsec/sandbox"
)

// The file of this name in OutputDir says what is known of the commands of a sandbox that has ended: the next edge finds them
// there for as long as they are kept.
const (
	endedName = "ended"
	maxEnded  = 16 << 20 // bytes of it: a thousand results, and what is left in memory
)

type endedRecord struct {
	ID      string
	Result  Result
	Streams [2]endedStream
}

// An endedStream is a body without what can be told from the file system.
type endedStream struct {
	Size, Charged          int64
	Memory                 []byte
	InFile, Frozen, Failed bool
	HeadEnd, RingAt, Tail  int64
	Marks                  [][2]int64
}

// recordEnded writes that file. An error costs no more than that the next edge knows nothing of this sandbox's commands.
func (c *Client) recordEnded() {
	all := c.Commands()
	list := make([]endedRecord, 0, len(all))
	for _, m := range all {
		if e, ok := m.ended(); ok {
			list = append(list, e)
		}
	}
	if len(list) == 0 {
		return
	}
	slices.SortFunc(list, func(a, b endedRecord) int { return a.Result.EndedAt.Compare(b.Result.EndedAt) })
	if err := c.spool.writeEnded(list); err != nil {
		c.o.Log.Warn("what is kept of an ended sandbox would not outlive this edge", "sandbox_id", c.o.ID, "error", err)
	}
}

func (m *Command) ended() (endedRecord, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := endedRecord{ID: m.id, Result: m.result}
	for i := range m.out {
		b := &m.out[i]
		s := &e.Streams[i]
		*s = endedStream{Size: b.size, Charged: b.charged, Memory: b.mem, InFile: b.inFile, Frozen: b.frozen, Failed: b.failed,
			HeadEnd: b.headEnd, RingAt: b.ringAt, Tail: b.tail}
		for _, k := range b.marks.list {
			s.Marks = append(s.Marks, [2]int64{k.offset, k.last})
		}
	}
	return e, m.done && m.started
}

func (s *spool) writeEnded(list []endedRecord) error {
	b, err := json.Marshal(list)
	if err != nil {
		return err
	}
	f, err := s.create(endedName)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(0); err != nil { // an earlier edge may have been killed here
		return err
	}
	_, err = f.Write(b)
	return err
}

// Ended makes a Client of what an earlier edge kept of a sandbox that has ended: it knows its commands and their output.
func Ended(o Options) (*Client, error) {
	f, err := os.Open(filepath.Join(o.OutputDir, endedName))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxEnded))
	if err != nil {
		return nil, err
	}
	var list []endedRecord
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("read what is kept: %w", err)
	}
	c := &Client{o: o, spool: newSpool(o.OutputDir), done: make(chan struct{}), linked: make(chan struct{}), commands: make(map[string]*Command), err: errClosed, closed: true}
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.stop()
	close(c.done)
	c.spool.reopen()
	for _, e := range list {
		if !sandbox.ValidCommandID(e.ID) || c.commands[e.ID] != nil {
			continue
		}
		m := newCommand(c, e.ID)
		m.result, m.started, m.done = e.Result, true, true
		for i := range m.out {
			m.out[i].restore(&e.Streams[i])
		}
		c.commands[m.id] = m
		c.finished = append(c.finished, m)
		c.spool.finished(m)
	}
	return c, nil
}

// reopen says that the directory is there.
func (s *spool) reopen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made = true
	s.node.measure(s.dir)
}

func (b *body) restore(s *endedStream) {
	b.size, b.mem, b.inFile, b.frozen, b.failed = s.Size, s.Memory, s.InFile, s.Frozen, s.Failed
	b.headEnd, b.ringAt, b.tail = s.HeadEnd, s.RingAt, s.Tail
	for _, k := range s.Marks {
		b.marks.list = append(b.marks.list, mark{k[0], k[1]})
	}
	if !s.valid() || b.charge(s.Charged) != nil {
		b.mem, b.size = nil, max(0, min(s.Size, maxOffset))
		b.drop()
		return
	}
	b.spool.addMemory(len(b.mem))
}

func (s *endedStream) valid() bool {
	switch {
	case s.Size < 0 || s.Size > maxOffset || s.Charged < 0 || s.Charged > HeadCap+TailCap:
		return false
	case !s.InFile:
		return int64(len(s.Memory)) == s.Size
	case !s.Frozen:
		return len(s.Memory) == 0 && s.HeadEnd == s.Size
	}
	return len(s.Memory) == 0 && 0 <= s.HeadEnd && s.HeadEnd <= s.RingAt && s.RingAt <= s.Tail && s.Tail <= s.Size
}
