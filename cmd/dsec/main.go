// Command dsec is the platform's main program: the control plane, the node agent and the command line, which are roles of
// one binary.
//
// What surprises:
//   - The user's commands go through the public API only (dsec/client). Edge and control plane are in the same binary, but
//     no command calls them but those that run or end a platform, so that whatever else dsec can do, any HTTP client can.
//   - Exit codes follow docker: the code of the command that ran, 124 after its time-out, 125 when the platform failed,
//     126 and 127 when the command could not be executed or was not found, 128+n when a signal ended dsec itself: it
//     dies of that signal, which shells show so. A wrong command line is 2, any other failure is 1.
//   - The first SIGINT, SIGTERM or SIGHUP cancels the command's context, the second cuts its clean-up short, the third
//     ends the process at once.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// commandTable is every command, in the order in which help lists them.
func commandTable() []command {
	return []command{
		upCommand, downCommand,
		runCommand, psCommand, inspectCommand, rmCommand, statsCommand, watchCommand,
		execCommand, shellCommand, attachCommand, logsCommand, killCommand, sessionCommand, cpCommand, filesCommand,
		portForwardCommand, urlCommand, httpCommand, topCommand, signalCommand,
		networkCommand, serviceCommand,
		imageCommand, workspaceCommand, toolkitCommand,
		doctorCommand, hostCommand, versionCommand, completionCommand(),
		edgeCommand, relayCommand,
	}
}

func main() {
	code, by := start()
	if by != 0 {
		dieOf(by)
	}
	os.Exit(code)
}

// dieOf ends dsec as the signal ends other programs. A shell whose child exits by itself, whatever its code, takes Ctrl-C for the
// child's affair, and goes on with its loop or script.
func dieOf(s syscall.Signal) {
	signal.Reset(s)
	if syscall.Kill(os.Getpid(), s) == nil {
		time.Sleep(time.Second) // another thread may get it; where it is ignored, the exit code tells
	}
}

// start returns the exit code, and which signal that stands for.
func start() (code int, by syscall.Signal) {
	c := newConsole(os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	c.screen = screenOf(os.Stdin)
	c.raw.of = c.screen
	defer c.raw.leave()
	ctx, stop := watchSignals(context.Background(), c, func(code int) {
		c.raw.leave()
		os.Exit(code)
	})
	defer stop()
	code = execute(ctx, c, commandTable(), os.Args[1:])
	var cause *interruptError
	if errors.As(context.Cause(ctx), &cause) && code == 128+int(cause.signal) {
		by = cause.signal
	}
	return code, by
}
