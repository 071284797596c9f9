package guest

import (
	"time"

	"google.golang.org/protobuf/proto"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

func protoSize(m proto.Message) int { return proto.Size(m) }

// message takes Started, Exit or Error of a command.
func (m *Command) message(t wire.Type, payload []byte) error {
	switch t {
	case wire.MsgStarted:
		e := new(aetherv1.Started)
		if err := decode(payload, e); err != nil {
			return err
		}
		return m.onStarted(e)
	case wire.MsgExit:
		e := new(aetherv1.Exit)
		if err := decode(payload, e); err != nil {
			return err
		}
		return m.onExit(e)
	case wire.MsgError:
		e := new(aetherv1.Error)
		if err := decode(payload, e); err != nil {
			return err
		}
		return m.onError(e)
	}
	return violation("a message that is not for a command")
}

func (m *Command) onStarted(e *aetherv1.Started) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.attached {
		return violation("a command started twice")
	}
	m.attached = true
	for i, offset := range []uint64{e.StdoutOffset, e.StderrOffset} {
		if err := m.jump(i, offset); err != nil {
			return err
		}
	}
	if m.request == nil { // only now is it known how much of its input aether has
		if m.stdin != nil && m.stdin.unknown {
			if err := m.stdin.found(e.StdinOffset); err != nil {
				return err
			}
			m.stdin.unknown = false
		}
		for _, in := range []*input{m.script, m.stdin} {
			if in != nil {
				in.rewind()
				in.ready()
			}
		}
	}
	m.request = nil
	m.started = true
	m.notify()
	return nil
}

// jump accepts that output before offset is gone, which is so only at the start of an attachment.
func (m *Command) jump(i int, offset uint64) error {
	b := &m.out[i]
	switch {
	case offset > maxOffset:
		return violation("an offset beyond any output")
	case int64(offset) == b.size:
	case int64(offset) < b.size || !m.fresh[i] || m.request != nil:
		return violation("output that does not continue")
	default:
		b.skip(int64(offset))
		b.acked = b.size
	}
	m.fresh[i] = false
	return nil
}

const maxOffset = 1 << 60 // bytes; nobody writes more

// data takes output.
func (m *Command) data(channel uint8, offset uint64, p []byte, flags wire.Flags) error {
	if channel != wire.Stdout && channel != wire.Stderr {
		return violation("output on a channel that has none")
	}
	i := int(channel - wire.Stdout)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return violation("output after the end of its command")
	}
	if err := m.jump(i, offset); err != nil {
		return err
	}
	b := &m.out[i]
	if b.size+int64(len(p)) > b.acked+wire.Window {
		return violation("output beyond its credit")
	}
	wasFailed := b.failed
	err := b.write(p)
	if flags&wire.Push != 0 && err == nil && !b.failed {
		err = b.toFile() // so that it may be acknowledged
	}
	if err != nil && !wasFailed {
		m.c.o.Log.Warn("output is no longer kept", "sandbox_id", m.c.o.ID, "command_id", m.id, "error", err)
	}
	m.acknowledge(i, flags&wire.Push != 0)
	m.notify()
	return nil
}

// acknowledge gives aether credit for what is stored, but none that would overrun a follower. It reports whether it did.
func (m *Command) acknowledge(i int, now bool) bool {
	b := &m.out[i]
	limit := b.stored()
	if limit <= b.acked || m.link == nil || m.done || (!now && limit-b.acked < ackStep) {
		return false
	}
	if at, ok := m.followers[i].slowest(); ok {
		limit = min(limit, max(at-b.spool.onTheWay(), b.spool.headCap)+b.spool.tailCap-wire.Window)
		if limit <= b.acked || (!now && limit-b.acked < ackStep) {
			return false
		}
	}
	b.acked = limit
	_ = m.link.conn.PostAck(m.stream, uint8(i)+wire.Stdout, uint64(limit), false) // the connection's error
	return true
}

// ack takes credit for input.
func (m *Command) ack(channel uint8, offset uint64, broken bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var in *input
	switch channel {
	case wire.Stdin:
		in = m.stdin
	case wire.Script:
		in = m.script
	}
	if in == nil {
		return violation("an acknowledgement of no input")
	}
	if in.unknown {
		if err := in.found(offset); err != nil {
			return err
		}
	}
	return in.ack(offset, broken)
}

func (m *Command) onExit(e *aetherv1.Exit) error {
	if err := m.exit(e); err != nil {
		return err
	}
	m.c.ended(m)
	return nil
}

func (m *Command) exit(e *aetherv1.Exit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkExit(e); err != nil {
		return err
	}
	r := &m.result
	r.ExitCode, r.Signal = int(e.ExitCode), int(e.Signal)
	r.TimedOut, r.Killed, r.NoOutput = e.TimedOut, e.Killed, e.TimedOut && e.NoOutput
	r.StdinBroken = e.StdinBroken || (m.stdin != nil && (m.stdin.broken || m.stdin.buf.Len() > 0))
	m.finish()
	for i := range m.out { // aether has little room for what nobody may ever ask for
		b := &m.out[i]
		if b.size-b.acked > retainInAether {
			b.acked = b.size
			_ = m.link.conn.PostAck(m.stream, uint8(i)+wire.Stdout, uint64(b.size), false)
		}
	}
	return nil
}

func (m *Command) checkExit(e *aetherv1.Exit) error {
	switch {
	case m.done:
		return violation("a command ended twice")
	case e.ExitCode < 0 || e.ExitCode > 255 || e.Signal < 0 || e.Signal > 64:
		return violation("an exit code that no process has")
	case e.Signal != 0 && e.ExitCode != 128+e.Signal:
		return violation("an exit code that contradicts its signal")
	}
	for i, size := range []uint64{e.StdoutSize, e.StderrSize} {
		if err := m.jump(i, size); err != nil {
			return err
		}
	}
	return nil
}

// finish ends the command. m.mu is held.
func (m *Command) finish() {
	m.started, m.done = true, true
	m.request, m.script, m.killed = nil, nil, nil
	m.result.EndedAt = time.Now()
	for i := range m.out {
		m.out[i].close()
	}
	m.endHolds()
	m.notify()
}

// onError ends a command that could not be started, or that aether no longer knows.
func (m *Command) onError(e *aetherv1.Error) error {
	m.mu.Lock()
	if m.done {
		m.mu.Unlock()
		return violation("an error after the end of its command")
	}
	wasStarted := m.request == nil
	m.mu.Unlock()
	if !wasStarted {
		m.c.remove(m) // before anyone learns of it: who tries again must not find it
	}
	m.mu.Lock()
	m.err = fromAether(e, "program_not_found")
	if wasStarted && e.Code == aetherv1.Code_CODE_NOT_FOUND {
		m.err = sandbox.Errorf(sandbox.DataLoss, "command_lost", "the sandbox no longer knows how the command ended")
	}
	m.finish()
	l, stream := m.link, m.stream
	m.link = nil
	m.mu.Unlock()
	_ = l.conn.Post(wire.MsgRelease, stream, nil) // the connection's error
	l.forget(stream)
	if wasStarted {
		m.c.ended(m)
	}
	return nil
}

// lost says that the connection is gone; the next one resumes.
func (m *Command) lost(l *link) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.link == l {
		m.link = nil
		for _, in := range []*input{m.stdin, m.script} {
			if in != nil {
				in.src = nil
			}
		}
	}
}

// abandon ends what is known of a command whose aether is gone; killed says that its sandbox ended with it.
func (m *Command) abandon(err error, killed bool) {
	m.mu.Lock()
	if m.done {
		m.mu.Unlock()
		return
	}
	if killed && m.started {
		m.result.Killed, m.result.Signal, m.result.ExitCode = true, 9, 137
		m.finish()
		m.mu.Unlock()
		m.c.ended(m)
		return
	}
	m.err = err
	for i := range m.out {
		m.out[i].close()
	}
	m.notify()
	m.mu.Unlock()
}

// release lets aether forget the command.
func (m *Command) release() {
	m.mu.Lock()
	l, stream := m.link, m.stream
	m.link = nil
	m.mu.Unlock()
	if l == nil {
		return
	}
	_ = l.conn.Post(wire.MsgRelease, stream, nil) // the connection's error
	l.forget(stream)
}

func (m *Command) dropBodies() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.out {
		m.out[i].drop()
	}
	m.notify()
}

// spill moves output to files. What does not fit there is dropped.
func (m *Command) spill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.out {
		b := &m.out[i]
		if len(b.mem) == 0 {
			continue
		}
		if err := b.toFile(); err != nil {
			b.fail()
		}
		b.close()
	}
}

func (m *Command) inMemory() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.out[0].mem) + len(m.out[1].mem)
}

func (m *Command) onDisk() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.out[0].inFile || m.out[1].inFile
}
