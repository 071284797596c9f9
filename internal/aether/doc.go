// Package aether is the in-sandbox proxy: PID 1 of every sandbox, and the only thing of ours that runs beside hostile
// code. It starts commands, carries their input and output, reads and writes files, and reaps. Package config has the
// table of what it inherits; the protocol is api/aether/v1 in frames of internal/wire.
//
// What surprises:
//
//   - Commands are forked by one locked thread, the spawner, which sits in the user's v1 control groups and on the user's
//     CPUs; everything else of aether is in its own group, which the OOM killer of the sandbox cannot choose from.
//   - A command's pipes are not polled for its first few milliseconds, and Started is not sent: most commands end sooner,
//     and then their output and exit go out in one write, read without any poller. See command.settle.
//   - Output that the edge has not acknowledged stays here, at most wire.Window a stream, and then the command blocks. It
//     goes on while no edge is there; the next connection gets what the last did not acknowledge.
//   - A command ends when its direct child ends, plus up to drainTime while others hold its pipes. What those write later
//     is read, counted and dropped, so that they never block.
//   - Of a terminal aether keeps the slave open, too, until the command's own process ends: so the output cannot end before.
//     Then what is left in the terminal is read, it is hung up, and nothing is drained for others.
//   - A named session (chronus) is a shell that lives on. What it is told, two lines a command, is in dialect.go; docs/decisions/0007
//     says why. A command of a session has no process of its own: its pid is the shell's, and its output is what comes
//     from the shell's pipes while it runs.
//   - As PID 1 all signals have their default action, which the kernel ignores for an init: no handler can be misled by a
//     forged SIGSEGV. A fault of ours therefore kills aether, and with it the sandbox.
//   - It runs as well as an ordinary process without control groups, which is how it is tested.
package aether
