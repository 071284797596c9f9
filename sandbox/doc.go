// Package sandbox is the domain: what a sandbox is called, which states it has and how it moves between them, what may
// be asked for, and in which ways things go wrong. It imports the standard library only and does nothing: everything
// here is data and pure functions, shared by control plane and edge, which do not know each other.
package sandbox
