package edge

import (
	"fmt"
	"time"

	"dsec/internal/edge/journal"
	"dsec/sandbox"
)

// A life is the pure part of a sandbox: what happens to it goes in with the time at which it happens, what must be done
// comes out. It has no goroutine, no clock and no lock; instance.mu guards it. Its moves are those of sandbox.State's table.
type life struct {
	state     sandbox.State
	gone      bool           // what is wanted of it: delete only changes this, and so is accepted in every state
	reason    journal.Reason // why it is in its state; the first reason to end wins
	trouble   string         // what the last teardown attempt failed of
	attempts  int            // teardown attempts that failed
	retryAt   time.Time      // of the next attempt; zero while one is under way
	createdAt time.Time
	createBy  time.Time // ready by then, or failed
	readyAt   time.Time
	endedAt   time.Time
	expiresAt time.Time
	idle      time.Duration
	retention time.Duration // how long the terminal record is kept
}

// effects are what an event demands, in the order in which they are carried out.
type effects uint8

const (
	cancelSetup   effects = 1 << iota // the steps under way shall stop
	freeQuota                         // it no longer counts against what admission holds for it
	recordEnding                      // into the journal, before anybody is told
	beginTeardown                     // one attempt
	recordEnded                       // into the journal; nothing is left
	forget                            // drop its terminal record
)

// use is what is known of a sandbox's activity when its life is asked about idleness.
type use struct {
	last time.Time // activity
	busy bool      // a command runs or a request is being served
}

// holdsQuota reports whether it counts: not once it shall be gone or has failed, however long its teardown takes.
func (l *life) holdsQuota() bool {
	return !l.gone && (l.state == sandbox.Creating || l.state == sandbox.Ready)
}

// move takes the table's edge. The events of this file are only raised where the table has one.
func (l *life) move(e sandbox.Event) {
	next, err := l.state.Next(e)
	if err != nil {
		panic("life: " + err.Error())
	}
	l.state = next
}

// ready reports whether the sandbox became ready: not if it was ended in the meantime.
func (l *life) ready(now time.Time) bool {
	if l.state != sandbox.Creating {
		return false
	}
	l.move(sandbox.EventReady)
	l.readyAt = now
	return true
}

// end says that somebody wants it gone.
func (l *life) end(now time.Time, code, message string) effects {
	return l.leave(sandbox.EventEnd, now, code, message)
}

// fault says that it cannot live on.
func (l *life) fault(now time.Time, code, message string) effects {
	return l.leave(sandbox.EventFault, now, code, message)
}

func (l *life) leave(e sandbox.Event, now time.Time, code, message string) effects {
	if e == sandbox.EventEnd {
		l.gone = true
	}
	before := l.state
	l.move(e)
	if before != sandbox.Creating && before != sandbox.Ready {
		return 0 // teardown is on its way, or done
	}
	l.reason = journal.Reason{Code: code, Message: message, At: now}
	fx := freeQuota | recordEnding | beginTeardown
	if before == sandbox.Creating {
		fx |= cancelSetup
	}
	return fx
}

// torn is the outcome of one teardown attempt.
func (l *life) torn(now time.Time, trouble string) effects {
	if l.state != sandbox.Stopping {
		return 0
	}
	if trouble != "" {
		l.trouble = trouble
		l.attempts++
		l.retryAt = now.Add(teardownBackoff(l.attempts))
		return 0
	}
	l.trouble, l.retryAt, l.endedAt = "", time.Time{}, now
	if sandbox.Ended(l.reason.Code) {
		l.move(sandbox.EventGone)
	} else {
		l.move(sandbox.EventGoneBad)
	}
	return recordEnded
}

// teardownBackoff is the pause after the n-th failed attempt: 100 ms, doubled each time, at most 30 s. It never ends.
func teardownBackoff(n int) time.Duration {
	const first, most = 100 * time.Millisecond, 30 * time.Second
	if n > 9 {
		return most
	}
	return min(first<<(n-1), most)
}

// tick is called when wake said so, or later.
func (l *life) tick(now time.Time, u use) effects {
	switch l.state {
	case sandbox.Creating:
		if !now.Before(l.createBy) {
			return l.fault(now, sandbox.ReasonStartTimeout, fmt.Sprintf("it was not ready within %v", l.createBy.Sub(l.createdAt).Round(time.Millisecond)))
		}
		return l.tickLifetime(now)
	case sandbox.Ready:
		if fx := l.tickLifetime(now); fx != 0 {
			return fx
		}
		if !u.busy && !now.Before(u.last.Add(l.idle)) {
			return l.end(now, sandbox.ReasonIdle, fmt.Sprintf("no command ran and no request came for %v", l.idle))
		}
	case sandbox.Stopping:
		if !l.retryAt.IsZero() && !now.Before(l.retryAt) {
			l.retryAt = time.Time{}
			return beginTeardown
		}
	case sandbox.Stopped, sandbox.Failed:
		if !now.Before(l.endedAt.Add(l.retention)) {
			return forget
		}
	}
	return 0
}

func (l *life) tickLifetime(now time.Time) effects {
	if now.Before(l.expiresAt) {
		return 0
	}
	return l.end(now, sandbox.ReasonLifetime, fmt.Sprintf("its lifetime of %v is over", l.expiresAt.Sub(l.createdAt)))
}

// wake is when tick has something to decide next; zero if only an event can change anything.
func (l *life) wake(now time.Time, u use) time.Time {
	switch l.state {
	case sandbox.Creating:
		return earlier(l.createBy, l.expiresAt)
	case sandbox.Ready:
		return earlier(l.expiresAt, l.idleAt(now, u))
	case sandbox.Stopping:
		return l.retryAt
	case sandbox.Stopped, sandbox.Failed:
		return l.endedAt.Add(l.retention)
	}
	return time.Time{}
}

// idleAt is the earliest time at which it can be idle for long enough.
func (l *life) idleAt(now time.Time, u use) time.Time {
	if u.busy {
		return now.Add(l.idle)
	}
	return u.last.Add(l.idle)
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// shownReason is the reason as people see it: with what keeps a teardown from ending.
func (l *life) shownReason() journal.Reason {
	r := l.reason
	if l.trouble != "" {
		r.Message = fmt.Sprintf("%s; teardown attempt %d failed and is repeated: %s", r.Message, l.attempts, l.trouble)
	}
	return r
}

// shown is what people see of it that events change.
func (l *life) shown() shownLife { return shownLife{l.state, l.shownReason()} }

type shownLife struct {
	state  sandbox.State
	reason journal.Reason
}
