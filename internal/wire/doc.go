// Package wire carries messages and byte streams between the edge and aether over one full-duplex connection.
//
// A frame is a 12-byte header and a payload. Messages are control: they overtake data, and one over MaxControl goes in
// several frames, which nothing interrupts. Data frames carry the absolute offset of their first byte, so that either
// side can resume after a reconnect. Credit is the same in every direction: the receiver acknowledges an offset, and
// the sender may be at most Window beyond it.
//
// What surprises:
//
//   - There is no writer goroutine while the socket takes what it is given. Whoever queues something and finds nobody
//     writing writes it, without blocking; only what the kernel does not take at once goes to a goroutine, which ends
//     when the queues are empty. An exec costs one write system call on each side and no extra wake-up.
//   - Data is pulled: a Source is asked for its next frame when there is room, so that at most one batch is copied ahead,
//     and ready sources take turns.
//   - Post never blocks. A peer that does not read while it makes us answer is disconnected once MaxQueued bytes wait.
//   - Memory per connection is bounded by MaxQueued, one partial message (Options.MaxMessage) and fixed buffers, whatever
//     the peer sends.
package wire
