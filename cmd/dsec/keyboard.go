package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"
)

const (
	// defaultDetachKeys are docker's.
	defaultDetachKeys = "ctrl-p,ctrl-q"
	// keyPause is how long the first of the keys that detach is held back for the next.
	keyPause = 500 * time.Millisecond
	// maxTyped is how much may be typed ahead of what the platform has taken, in bytes.
	maxTyped = 1 << 20
)

// parseKeys reads a sequence of keys as docker writes it: "ctrl-p,ctrl-q", "~,.". "" is none.
func parseKeys(text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	var keys []byte
	for _, word := range strings.Split(text, ",") {
		name, control := strings.CutPrefix(strings.ToLower(word), "ctrl-")
		switch {
		case !control && len(word) == 1 && word[0] < 0x80:
			keys = append(keys, word[0])
		case control && len(name) == 1 && (name[0] >= 'a' && name[0] <= 'z' || strings.ContainsAny(name, `@[\]^_`)):
			keys = append(keys, name[0]&0x1f)
		default:
			return nil, usagef("%q is no key; write the keys that detach like ctrl-p,ctrl-q: characters, or ctrl- with a letter or one of @[\\]^_", word)
		}
	}
	return keys, nil
}

// A keyFilter finds a sequence of keys in what is typed. It holds back what may be the beginning of it.
type keyFilter struct {
	keys []byte
	held int // of keys
}

// pass gives what is to be sent of p, and whether the sequence has ended in it.
func (f *keyFilter) pass(p []byte) (out []byte, found bool) {
	if len(f.keys) == 0 {
		return p, false
	}
	for _, b := range p {
		for f.held > 0 && b != f.keys[f.held] {
			out = append(out, f.fallBack()...)
		}
		if b != f.keys[f.held] {
			out = append(out, b)
			continue
		}
		if f.held++; f.held == len(f.keys) {
			f.held = 0
			return out, true
		}
	}
	return out, false
}

// fallBack gives up the longest match for the next shorter one, and what of it is to be sent.
func (f *keyFilter) fallBack() []byte {
	for n := f.held - 1; n > 0; n-- {
		if bytes.Equal(f.keys[:n], f.keys[f.held-n:f.held]) {
			out := f.keys[:f.held-n]
			f.held = n
			return out
		}
	}
	return f.release()
}

// release gives what was held back.
func (f *keyFilter) release() []byte {
	out := f.keys[:f.held]
	f.held = 0
	return out
}

// errDetached says that the keys that detach were typed.
var errDetached = errors.New("detached")

func isDetached(err error) bool { return errors.Is(err, errDetached) }

// A keyboard reads what is typed, ahead of what is taken: the keys that detach work also while the platform is away.
type keyboard struct {
	filter   keyFilter
	detached chan struct{} // is closed when the keys that detach were typed

	mu    sync.Mutex
	typed []byte
	err   error
	more  chan struct{} // has something after each change
	room  chan struct{} // likewise, after something was taken
}

func newKeyboard(keys []byte) *keyboard {
	return &keyboard{filter: keyFilter{keys: keys}, detached: make(chan struct{}), more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// read reads from r until it ends, or the keys that detach are typed, or ctx ends. The goroutine that reads is not waited for: a
// read of a terminal cannot be interrupted.
func (k *keyboard) read(ctx context.Context, r io.Reader) {
	pieces := make(chan piece)
	go readPieces(ctx, r, pieces)
	for {
		var pause <-chan time.Time
		if k.filter.held > 0 {
			pause = time.After(keyPause)
		}
		select {
		case <-ctx.Done():
			return
		case <-pause:
			k.add(ctx, k.filter.release(), nil)
		case p := <-pieces:
			out, found := k.filter.pass(p.data)
			err := p.err
			if found {
				close(k.detached)
				err = errDetached
			} else if err != nil {
				out = append(out, k.filter.release()...)
			}
			k.add(ctx, out, err)
			if err != nil {
				return
			}
		}
	}
}

func (k *keyboard) add(ctx context.Context, p []byte, err error) {
	for {
		k.mu.Lock()
		if len(k.typed) < maxTyped || err != nil {
			k.typed = append(k.typed, p...)
			k.err = err
			k.mu.Unlock()
			signalTo(k.more)
			return
		}
		k.mu.Unlock()
		select {
		case <-k.room:
		case <-ctx.Done():
			return
		}
	}
}

// take gives what has been typed, at most n bytes and as soon as there is anything; err is what follows after it.
func (k *keyboard) take(ctx context.Context, n int) ([]byte, error) {
	for {
		k.mu.Lock()
		p := k.typed[:min(n, len(k.typed))]
		k.typed = k.typed[len(p):]
		err := k.err
		if len(k.typed) > 0 {
			err = nil
		}
		k.mu.Unlock()
		if len(p) > 0 || err != nil {
			signalTo(k.room)
			return p, err
		}
		select {
		case <-k.more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func signalTo(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
