// Package relay carries the connections of sandboxes to the outside: it accepts them in the router's network namespace, where every
// address is local, and dials as an ordinary client from the host's. No packet of a sandbox leaves its node.
//
// What surprises:
//
//   - It is a process of its own, so that connections outlive the edge. An edge that comes finds it through its socket.
//   - Who a connection is of, its source address says: the packet filter lets no other pass.
//   - The filter has judged already. The relay judges again, by the rules themselves and not by their compiled form, and asks the
//     kernel besides whether an address is the host's own, whatever it got since.
//   - A connection inside stands before the one outside is dialled. Where that fails, the one inside is reset.
//   - With a bound on bytes a connection moves at most the bound's twentieth at a time and then waits until that is paid for.
package relay
