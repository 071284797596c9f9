package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dsec/internal/edge/failpoint"
)

// a thing is what the test's steps make.
type thing struct {
	mu       sync.Mutex // a step that hangs runs beside the others
	calls    []string
	setup    map[string]func(context.Context) error
	teardown map[string]func(context.Context) error
}

func step(name string) Step[*thing] {
	run := func(kind string, m func(*thing) map[string]func(context.Context) error) func(context.Context, *thing) error {
		return func(ctx context.Context, s *thing) error {
			s.mu.Lock()
			s.calls = append(s.calls, kind+name)
			s.mu.Unlock()
			if f := m(s)[name]; f != nil {
				return f(ctx)
			}
			return nil
		}
	}
	return Step[*thing]{
		Name:     "t." + name,
		Setup:    run("+", func(s *thing) map[string]func(context.Context) error { return s.setup }),
		Teardown: run("-", func(s *thing) map[string]func(context.Context) error { return s.teardown }),
	}
}

var list = New(step("a"), step("b"), step("c"))

func TestOrderAndTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &thing{setup: map[string]func(context.Context) error{"b": func(context.Context) error { time.Sleep(time.Second); return nil }}}
		var p Progress
		if err := list.Setup(t.Context(), s, &p); err != nil {
			t.Fatal(err)
		}
		if err := list.Teardown(t.Context(), s, &p); err != nil {
			t.Fatal(err)
		}
		if err := list.Teardown(t.Context(), s, &p); err != nil { // what is torn down is not torn down again
			t.Fatal(err)
		}
		if want := []string{"+a", "+b", "+c", "-c", "-b", "-a"}; !slices.Equal(s.calls, want) {
			t.Errorf("%v", s.calls)
		}
		if took := list.Took(&p); took["t.b"] != time.Second || len(took) != 3 {
			t.Errorf("%v", took)
		}
	})
}

func TestFailedSetupIsTornDownToo(t *testing.T) {
	boom := errors.New("boom")
	s := &thing{setup: map[string]func(context.Context) error{"b": func(context.Context) error { return boom }}}
	var p Progress
	err := list.Setup(context.Background(), s, &p)
	var se *Error
	if !errors.As(err, &se) || se.Step != "t.b" || !errors.Is(err, boom) {
		t.Fatalf("%v", err)
	}
	if err := list.Teardown(context.Background(), s, &p); err != nil {
		t.Fatal(err)
	}
	if want := []string{"+a", "+b", "-b", "-a"}; !slices.Equal(s.calls, want) {
		t.Errorf("%v", s.calls)
	}
}

func TestTeardownGoesOnAndIsRetried(t *testing.T) {
	fails := 2
	s := &thing{teardown: map[string]func(context.Context) error{"b": func(context.Context) error {
		if fails--; fails >= 0 {
			return fmt.Errorf("busy")
		}
		return nil
	}}}
	var p Progress
	p.Assume(list.Len()) // never set up here: an earlier process did
	for i := range 3 {
		if err := list.Teardown(context.Background(), s, &p); (err == nil) != (i == 2) {
			t.Errorf("attempt %d: %v", i, err)
		}
	}
	if want := []string{"-c", "-b", "-a", "-b", "-b"}; !slices.Equal(s.calls, want) {
		t.Errorf("%v", s.calls)
	}
}

func TestHangingTeardownIsLeftBehindOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		s := &thing{teardown: map[string]func(context.Context) error{"c": func(context.Context) error { <-free; return nil }}}
		var p Progress
		p.Assume(list.Len())
		start := time.Now()
		if err := list.Teardown(t.Context(), s, &p); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%v", err)
		}
		if d := time.Since(start); d != TeardownDeadline+grace {
			t.Errorf("took %v", d)
		}
		if want := []string{"-c", "-b", "-a"}; !slices.Equal(s.calls, want) {
			t.Errorf("the others were not torn down: %v", s.calls)
		}
		go func() { time.Sleep(time.Second); close(free) }()
		if err := list.Teardown(t.Context(), s, &p); err != nil {
			t.Fatal(err)
		}
		if n := len(s.calls); n != 3 {
			t.Errorf("a second teardown was started beside the hanging one: %v", s.calls)
		}
	})
}

func TestCancelledContextStartsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s := &thing{}
	var p Progress
	if err := list.Setup(ctx, s, &p); !errors.Is(err, context.Canceled) || len(s.calls) != 0 {
		t.Errorf("%v %v", err, s.calls)
	}
}

func TestFailpoints(t *testing.T) {
	for _, name := range list.Names() {
		for _, at := range []string{name + ":before", name + ":after", name + ".teardown:before", name + ".teardown:after"} {
			if !slices.Contains(failpoint.List(), at) {
				t.Errorf("%s is not declared", at)
			}
		}
	}
	restore, hits, err := failpoint.Set("t.b:after:error")
	if err != nil {
		t.Fatal(err)
	}
	defer restore()
	var p Progress
	s := &thing{}
	var fe *failpoint.Error
	if err := list.Setup(context.Background(), s, &p); !errors.As(err, &fe) || hits() != 1 {
		t.Errorf("%v", err)
	}
}

func TestAfterWaitsForAnotherTeardown(t *testing.T) {
	first := step("first")
	first.After = "t.last"
	waiting := New(first, step("between"), step("last"))
	busy := errors.New("busy")
	s := &thing{teardown: map[string]func(context.Context) error{"last": func(context.Context) error { return busy }}}
	var p Progress
	if err := waiting.Setup(t.Context(), s, &p); err != nil {
		t.Fatal(err)
	}
	s.calls = nil
	var se *Error
	if err := waiting.Teardown(t.Context(), s, &p); !errors.Is(err, busy) || !errors.As(err, &se) || se.Step != "t.last" {
		t.Errorf("%v", err)
	}
	if want := []string{"-last", "-between"}; !slices.Equal(s.calls, want) {
		t.Errorf("%v, want %v", s.calls, want)
	}
	s.teardown = nil
	if err := waiting.Teardown(t.Context(), s, &p); err != nil {
		t.Error(err)
	}
	if want := []string{"-last", "-between", "-last", "-first"}; !slices.Equal(s.calls, want) {
		t.Errorf("%v, want %v", s.calls, want)
	}
	// A step whose setup never began has nothing to wait for.
	s = &thing{setup: map[string]func(context.Context) error{"between": func(context.Context) error { return busy }}}
	p = Progress{}
	if err := waiting.Setup(t.Context(), s, &p); !errors.Is(err, busy) {
		t.Fatal(err)
	}
	if err := waiting.Teardown(t.Context(), s, &p); err != nil {
		t.Error(err)
	}
}
