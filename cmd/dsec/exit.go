package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"dsec/client"
	"dsec/sandbox"
)

// Exit codes of dsec itself; 125 to 127 as docker has them.
const (
	exitFailure       = 1
	exitUsage         = 2
	exitTimeout       = 124
	exitPlatform      = 125
	exitNotExecutable = 126
	exitNotFound      = 127
)

// A usageError is a command line that makes no sense.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// An exitError ends dsec with a code. With an err it is also reported.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err != nil {
		return e.err.Error()
	}
	return fmt.Sprintf("exit %d", e.code)
}

func (e *exitError) Unwrap() error { return e.err }

// An interruptError is the cause of a context that a signal ended.
type interruptError struct{ signal syscall.Signal }

func (e *interruptError) Error() string { return "ended by " + e.signal.String() }

// report says what went wrong, once, and returns the exit code.
func (c *console) report(ctx context.Context, err error, asJSON bool) int {
	if err == nil {
		return 0
	}
	code, silent := exitCode(ctx, err)
	if silent {
		return code
	}
	c.sayError(err, asJSON)
	return code
}

// sayError says what went wrong.
func (c *console) sayError(err error, asJSON bool) {
	if asJSON {
		c.reportJSON(err)
	} else {
		c.say("%s", userMessage(err))
	}
}

// say prints one line for the user on stderr. Text from elsewhere cannot drive the terminal.
func (c *console) say(format string, args ...any) {
	end := "\n"
	if c.raw.on() {
		end = "\r\n"
	}
	fmt.Fprintf(c.stderr, "dsec: %s%s", printable(fmt.Sprintf(format, args...)), end)
}

// exitCode is the exit code for err, and whether nothing is to be said: the user knows that he pressed Ctrl-C.
func exitCode(ctx context.Context, err error) (code int, silent bool) {
	var interrupt *interruptError
	var exit *exitError
	var usage *usageError
	var output *client.WriteError
	switch {
	case errors.As(err, &exit):
		return exit.code, exit.err == nil
	case errors.As(err, &usage):
		return exitUsage, false
	case errors.As(context.Cause(ctx), &interrupt):
		return 128 + int(interrupt.signal), true
	case errors.As(err, &output) && errors.Is(err, syscall.EPIPE): // whoever read our output has gone
		return 128 + int(syscall.SIGPIPE), true
	}
	return exitFailure, false
}

// userMessage is the part of err that helps a user.
func userMessage(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Message
	}
	return err.Error()
}

// reportJSON prints {"error": {...}} on stderr for programs that asked for JSON.
func (c *console) reportJSON(err error) {
	body := struct {
		Code    string            `json:"code"`
		Reason  string            `json:"reason,omitempty"`
		Message string            `json:"message"`
		Facts   map[string]string `json:"facts,omitempty"`
	}{Code: "failed", Message: userMessage(err)}
	var e *sandbox.Error
	if errors.As(err, &e) {
		body.Code, body.Reason, body.Facts = e.Class.String(), e.Reason, e.Facts
	}
	out, _ := json.Marshal(map[string]any{"error": body}) // strings only: cannot fail
	fmt.Fprintf(c.stderr, "%s\n", strings.TrimSpace(string(out)))
}

// cleanup is a context for undoing things: it outlives the command's own context and ends with the deadline or when the
// user insists.
func (c *console) cleanup(limit time.Duration) (context.Context, context.CancelFunc) {
	parent := c.forced
	if parent == nil {
		parent = context.Background()
	}
	return context.WithTimeout(parent, limit)
}

// oneWish is how close together signals count as one: timeout(1) and some shells signal a process and also its group.
const oneWish = time.Second / 2

// watchSignals returns a context that the first signal ends, with an *interruptError as cause; the second ends c.forced, the third
// calls exit. SIGPIPE is caught too, so that a vanished reader of our output is an error to clean up after and not the
// end of the process. A signal that was ignored when dsec started (nohup, background jobs) stays ignored.
func watchSignals(parent context.Context, c *console, exit func(int)) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	forced, force := context.WithCancelCause(parent)
	c.forced = forced
	signals := make(chan os.Signal, 3)
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(s) {
			signal.Notify(signals, s)
		}
	}
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	done := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		var last time.Time
		for count := 0; ; {
			select {
			case <-done:
				return
			case s := <-signals:
				if now := c.now(); count == 0 || now.Sub(last) >= oneWish {
					count, last = count+1, now
				} else {
					continue
				}
				number, _ := s.(syscall.Signal)
				switch count {
				case 1:
					cancel(&interruptError{number})
				case 2:
					force(&interruptError{number})
				default:
					exit(128 + int(number))
				}
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		signal.Stop(pipe)
		close(done)
		<-finished
		cancel(nil)
		force(nil)
	}
}
