// Command dsec is the platform's main program: the control plane, the node agent and the command line, which are roles of
// one binary.
//
// What surprises:
//   - The user's commands go through the public API only (dsec/client). Edge and control plane are in the same binary, but
//     no command calls them but those that run or end a platform, so that whatever else dsec can do, any HTTP client can.
//   - Exit codes follow docker: the code of the command that ran, 124 after its time-out, 125 when the platform failed,
//     126 and 127 when the command could not be executed or was not found, 128+n when a signal ended dsec itself. A wrong
//     command line is 2, any other failure is 1.
//   - The first SIGINT, SIGTERM or SIGHUP cancels the command's context, the second cuts its clean-up short, the third
//     ends the process at once.
package main

import (
	"context"
	"os"
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
		doctorCommand, versionCommand, completionCommand(),
		edgeCommand,
	}
}

func main() { os.Exit(start()) }

func start() int {
	c := newConsole(os.Stdin, os.Stdout, os.Stderr, os.Getenv)
	c.screen = screenOf(os.Stdin)
	c.raw.of = c.screen
	defer c.raw.leave()
	ctx, stop := watchSignals(context.Background(), c, func(code int) {
		c.raw.leave()
		os.Exit(code)
	})
	defer stop()
	return execute(ctx, c, commandTable(), os.Args[1:])
}
