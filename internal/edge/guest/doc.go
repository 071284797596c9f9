// Package guest is the edge's client of aether: it starts commands in a sandbox, keeps what they write, and moves files.
// There is one Client per live sandbox, over one connection that it makes anew when it breaks.
//
// Everything that aether sends is untrusted. What no honest aether would send ends the connection and the Client, with
// reason "guest_protocol"; what it does not send in time fails the request that waits for it.
//
// What surprises:
//
//   - Output is drained whether or not anybody reads it, and kept up to a cap per stream: the first HeadCap bytes, the
//     last TailCap, and a count of what was between. Only a follower holds the command back, so that it misses nothing.
//   - Small output stays in memory and is not acknowledged: aether keeps it, too, and an edge that is killed gets it again
//     from there. Spooled output is acknowledged, and the next edge finds it in OutputDir.
//     The file of a tail begins with what the next edge must know to read it.
//   - All Clients of a process share what they may keep: beyond nodeMemory output goes to files, and beyond a part of the disk
//     the oldest finished output of any sandbox goes. See node.
//   - A panic in handling a frame is a violation like others: see wire.Options.Contain.
//   - The last keepUnreleased results stay in aether, for the same reason: a caller that asks again after a crash of the
//     edge must find its command, not run it twice.
//   - A Client that lost its aether for good ends all commands as killed.
package guest
