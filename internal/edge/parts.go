package edge

import (
	"context"
	"io"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/guest"
	"dsec/internal/edge/network"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// The parts around the edge, as small as it needs them. Every teardown is idempotent and safe without its setup; Sweep
// removes what belongs to no id in keep and returns whose things it found; Close removes everything that the part made.
type (
	// Layers mounts environments, once per node.
	Layers interface {
		// Acquire gives the mounted directories of sources (lowest first), topmost first, and holds them for holder.
		Acquire(ctx context.Context, holder sandbox.ID, sources []rootfs.Source) ([]string, error)
		Release(ctx context.Context, holder sandbox.ID) error
		Sweeper
	}
	// Uppers makes writable directories with a hard quota.
	Uppers interface {
		Create(ctx context.Context, id sandbox.ID, bytes int64) (rootfs.Upper, error)
		Remove(ctx context.Context, id sandbox.ID) error
		// Usage is the bytes that the directory of id holds, as of the file system's last commit, and its limit.
		Usage(id sandbox.ID) (used, limit int64, err error)
		// Free is what can still be written on the disk that holds them, and its size, in bytes.
		Free() (free, total int64, err error)
		Sweeper
	}
	// InodeCounter is Uppers whose quota counts inodes, too.
	InodeCounter interface {
		CreateCounted(ctx context.Context, id sandbox.ID, bytes, inodes int64) (rootfs.Upper, error)
	}
	// Networks hands out network slots.
	Networks interface {
		// Acquire gives id a slot whose policy is p, or the slot that it has, as it is now.
		Acquire(ctx context.Context, id sandbox.ID, p network.Policy) (driver.Network, error)
		// SetPolicy replaces the policy in one step, which a cancelled context does not leave half done. Connections that the
		// new one does not allow are reset when it returns. A slot without a link
		// gets one, if p opens something: Acquire tells its addresses.
		SetPolicy(ctx context.Context, id sandbox.ID, p network.Policy) error
		// Refused is what the network refused to a sandbox since it has its slot.
		Refused(id sandbox.ID) (network.Refusals, error)
		Release(ctx context.Context, id sandbox.ID) error
		// Traffic reads the counters of a slot, without its loopback.
		Traffic(n driver.Network) (driver.Traffic, error)
		Sweeper
	}
	// Cgroups makes control groups.
	Cgroups interface {
		Create(ctx context.Context, id sandbox.ID, l sandbox.Limits) (driver.Cgroups, error)
		Remove(ctx context.Context, id sandbox.ID) error
		// OOMKills counts the kernel's out-of-memory kills in the user part so far.
		OOMKills(cg driver.Cgroups) (int64, error)
		// Stats reads the accounts of a sandbox.
		Stats(cg driver.Cgroups) (driver.Stats, error)
		// Trusted makes or finds the groups of a sandbox's trusted commands; Remove removes them.
		Trusted(ctx context.Context, id sandbox.ID, cg driver.Cgroups, l sandbox.Limits) (driver.Trusted, error)
		// KillStuck kills the children of aether that have not become a command for that long: aether waits for them.
		KillStuck(cg driver.Cgroups, age time.Duration) (killed int, err error)
		Sweeper
	}
	// Tools are the shell and tools of trusted commands.
	Tools interface {
		// Mount is a descriptor of their directory; it is theirs.
		Mount() int
	}
	// Sweeper is what every part can do besides.
	Sweeper interface {
		Sweep(ctx context.Context, keep map[sandbox.ID]bool) ([]sandbox.ID, error)
		Close(ctx context.Context) error
	}
)

// ConnectGuest waits until aether answers, or ctx ends.
type ConnectGuest func(ctx context.Context, o GuestOptions) (Guest, error)

// EndedGuest finds what an earlier edge kept of a sandbox that has ended: its commands and their output.
type EndedGuest func(o GuestOptions) (Guest, error)

// A Guest is the edge's client of one aether. What it says of commands stays readable after Close.
type Guest interface {
	GuestFiles
	// Done is closed when aether is gone for good; Err says why.
	Done() <-chan struct{}
	Err() error
	// Close leaves aether and its commands running.
	Close() error
	// Start starts a command, or finds the one with this id.
	Start(ctx context.Context, id string, cmd sandbox.Command) (GuestCommand, error)
	Command(id string) (GuestCommand, bool)
	// ForgetCommand drops a command that has ended, with its output.
	ForgetCommand(id string)
	Commands() []GuestCommand
	Running() int
	// CreateSession makes a session, or finds the one of this name that lives.
	CreateSession(ctx context.Context, spec sandbox.SessionSpec) (GuestSession, error)
	Sessions(ctx context.Context) ([]GuestSession, error)
	DeleteSession(ctx context.Context, name string) error
	ReadFile(ctx context.Context, f FileRead) (FileInfo, io.ReadCloser, error)
	WriteFile(ctx context.Context, f FileWrite, r io.Reader) (size int64, sum []byte, err error)
	// ReadArchive packs a tree; WriteArchive unpacks one below a directory.
	ReadArchive(ctx context.Context, a ArchiveRead) (GuestArchive, error)
	WriteArchive(ctx context.Context, a ArchiveWrite, r io.Reader) (ArchiveResult, error)
	// Dial connects to a TCP port as a program inside would: on the loopback, or of host where that is given.
	Dial(ctx context.Context, host string, port int, timeout time.Duration) (GuestConn, error)
	// Trust hands aether what it needs for trusted commands. To do it again is harmless.
	Trust(ctx context.Context, g Grounds) error
	// Processes lists what runs inside; more: there is more than it lists.
	Processes(ctx context.Context) (list []Process, more bool, err error)
	// Signal signals one process; startedTicks, if not 0, must be its own.
	Signal(ctx context.Context, pid, signal int, startedTicks uint64) error
}

// A GuestArchive is an archive that is being packed. Read returns io.EOF only where it is whole, and then Result says how.
type GuestArchive interface {
	io.ReadCloser
	Result() (ArchiveResult, error)
}

// A GuestCommand is one command of a sandbox.
type GuestCommand interface {
	ID() string
	// Wait returns when it has ended.
	Wait(ctx context.Context) error
	Result() CommandResult
	// Output reads stream 1 or 2: to what is there, or if told to follow until the command's end.
	Output(stream int, q OutputQuery) (OutputReader, error)
	// Head is at most limit bytes from the stream's start.
	Head(stream, limit int) []byte
	WriteStdin(ctx context.Context, offset int64, r io.Reader, close bool) (int64, error)
	// WriteStdinExactly skips nothing: if more has arrived, it fails with reason "stdin_moved".
	WriteStdinExactly(ctx context.Context, offset int64, r io.Reader, close bool) (int64, error)
	Kill(ctx context.Context, signal int) error
	SetOOM(killed bool)
	// Known waits until the result says how much input has arrived.
	Known(ctx context.Context) error
	// Resize sets the window of its terminal.
	Resize(ctx context.Context, rows, cols int) error
}

// Plain data of the guest's client.
type (
	CommandResult = guest.Result
	StreamSize    = guest.StreamSize
	FileRead      = guest.FileRead
	FileInfo      = guest.FileInfo
	FileWrite     = guest.FileWrite
	ArchiveRead   = guest.ArchiveRead
	ArchiveWrite  = guest.ArchiveWrite
	ArchiveResult = guest.ArchiveResult
	Process       = guest.Process
	Grounds       = guest.Grounds
	GuestOptions  = guest.Options
	GuestSession  = guest.Session
	OutputQuery   = guest.OutputQuery
	OutputReader  = guest.OutputReader
)

// A HostSample is how full the machine is.
type HostSample struct {
	MemoryTotal, MemoryAvailable int64 // bytes
	Tasks, TasksMax              int64 // threads
	Files, FilesMax              int64 // descriptors of this process
	Mounts, MountsMax            int64 // of this process's mount namespace; each sandbox has one of its own
	CPUs                         float64
	Load1                        float64
	CPUBusy                      float64  // share of all CPUs since the last sample, 0..1
	Pressure                     Pressure // all 0 where the kernel does not tell
}

// A Host measures the machine.
type Host interface {
	Sample() (HostSample, error)
}
