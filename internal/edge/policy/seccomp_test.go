package policy

import (
	"encoding/binary"
	"strings"
	"testing"

	"dsec/sandbox"
)

// A call is what a filter sees: struct seccomp_data.
type call struct {
	nr, arch uint32
	args     [6]uint64
}

func (c call) word(off uint32) uint32 {
	switch {
	case off == offNumber:
		return c.nr
	case off == offArch:
		return c.arch
	}
	v := c.args[(off-offArgs)/8]
	if (off-offArgs)%8 == 4 {
		v >>= 32
	}
	return uint32(v)
}

// run interprets a program as the kernel does, from the bytes that the kernel gets. It also counts instructions.
func run(t testing.TB, prog []byte, c call) (Action, int) {
	t.Helper()
	var acc uint32
	e := binary.NativeEndian
	for pc, steps := 0, 1; ; steps++ {
		if pc < 0 || pc*8+8 > len(prog) {
			t.Fatalf("call %d: program counter %d is outside", c.nr, pc)
		}
		i := prog[pc*8:]
		code, jt, jf, k := e.Uint16(i), int(i[2]), int(i[3]), e.Uint32(i[4:])
		pc++
		jump := func(taken bool) {
			if taken {
				pc += jt
			} else {
				pc += jf
			}
		}
		switch code {
		case opLoad:
			acc = c.word(k)
		case opAnd:
			acc &= k
		case opJump:
			pc += int(k)
		case opJeq:
			jump(acc == k)
		case opJge:
			jump(acc >= k)
		case opRet:
			return Action(k), steps
		default:
			t.Fatalf("instruction %#x is not one that a filter may have", code)
		}
	}
}

func program(t testing.TB) []byte {
	t.Helper()
	prog, err := SeccompProgram("amd64")
	if err != nil {
		t.Fatal(err)
	}
	return prog
}

// expected is the profile read directly, without compiling.
func expected(p Profile, c call) Action {
	r, known := p[c.nr]
	if !known || c.arch != archX8664 {
		return ErrnoNosys
	}
	for _, cl := range r.Clauses {
		holds := true
		for _, m := range cl.When {
			holds = holds && uint32(c.args[m.Arg])&m.Mask == m.Value
		}
		if holds {
			return cl.Then
		}
	}
	return r.Otherwise
}

func TestEveryCallIsWhatTheProfileSays(t *testing.T) {
	p, prog := DefaultProfile(), program(t)
	longest := 0
	for nr := range uint32(1 << 13) {
		for _, bits := range []uint32{0, 0x40000000, 0x80000000, 0xffffe000} {
			c := call{nr: nr | bits, arch: archX8664}
			got, steps := run(t, prog, c)
			if want := expected(p, c); got != want {
				t.Fatalf("call %#x: %#x, want %#x", c.nr, got, want)
			}
			longest = max(longest, steps)
			c.arch = 0x40000003 // AUDIT_ARCH_I386
			if got, _ := run(t, prog, c); got != ErrnoNosys {
				t.Fatalf("i386 call %#x: %#x", c.nr, got)
			}
		}
	}
	if longest > 48 { // socket and ioctl have the most clauses
		t.Errorf("%d instructions for one call: the search is no binary search", longest)
	}
}

func TestSourceNamesAreKnown(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range allowed {
		if _, ok := syscallNumbers[name]; !ok {
			t.Errorf("%s has no number", name)
		}
		if seen[name] {
			t.Errorf("%s is listed twice", name)
		}
		seen[name] = true
	}
	for name := range conditional() {
		if _, ok := syscallNumbers[name]; !ok || seen[name] {
			t.Errorf("%s: known %v, also listed as allowed %v", name, ok, seen[name])
		}
	}
	byNumber := map[uint32]string{}
	for name, nr := range syscallNumbers {
		if other, taken := byNumber[nr]; taken {
			t.Errorf("%s and %s have the number %d", name, other, nr)
		}
		byNumber[nr] = name
	}
}

// What must never be allowed, whatever the source says some day.
func TestRefusedCalls(t *testing.T) {
	prog := program(t)
	for _, name := range strings.Fields(`
		mount umount2 move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr pivot_root setns
		bpf perf_event_open userfaultfd keyctl add_key request_key io_uring_setup io_uring_enter io_uring_register
		open_by_handle_at kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct
		iopl ioperm settimeofday clock_settime syslog quotactl quotactl_fd nfsservctl lookup_dcookie fanotify_init
		sethostname setdomainname kcmp pidfd_getfd process_madvise vhangup`) {
		if got, _ := run(t, prog, call{nr: syscallNumbers[name], arch: archX8664}); got != ErrnoPerm {
			t.Errorf("%s: %#x, want EPERM", name, got)
		}
	}
}

func TestArguments(t *testing.T) {
	prog := program(t)
	const high = 1 << 40 // the kernel looks at ints only
	for _, c := range []struct {
		name string
		args []uint64
		want Action
	}{
		{"socket", []uint64{1, 1, 0}, Allow},
		{"socket", []uint64{1 | high, 1, 0}, Allow},
		{"socket", []uint64{2, 1 | 0x80000, 0}, Allow}, // SOCK_CLOEXEC
		{"socket", []uint64{10, 2, 0}, Allow},
		{"socket", []uint64{2, 1, 6}, Allow},
		{"socket", []uint64{2, 2, 1}, Allow}, // ping
		{"socket", []uint64{10, 2, 58}, Allow},
		{"socket", []uint64{2, 1, 132}, ErrnoProto}, // SCTP
		{"socket", []uint64{10, 5, 132 | high}, ErrnoProto},
		{"socket", []uint64{2, 1, 262}, ErrnoProto}, // MPTCP
		{"socket", []uint64{16, 3, 0}, Allow},
		{"socket", []uint64{16, 3, 12}, ErrnoAfnos},        // NETLINK_NETFILTER
		{"socket", []uint64{16, 3, 12 | high}, ErrnoAfnos}, // not hidden by the high half
		{"socket", []uint64{16 | high, 3, 12}, ErrnoAfnos},
		{"socket", []uint64{17, 3, 0}, ErrnoAfnos}, // AF_PACKET
		{"socket", []uint64{2, 10, 3}, ErrnoPerm},  // its old spelling
		{"socket", []uint64{2, 10 | 0x800, 3}, ErrnoPerm},
		{"socket", []uint64{38, 5, 0}, ErrnoAfnos}, // AF_ALG
		{"socket", []uint64{40, 1, 0}, ErrnoAfnos}, // AF_VSOCK
		{"socket", []uint64{40 | high, 1, 0}, ErrnoAfnos},
		{"socketpair", []uint64{1, 1, 0}, Allow},
		{"socketpair", []uint64{2, 1, 0}, ErrnoAfnos},
		{"clone", []uint64{0x003d0f00}, Allow}, // a thread
		{"clone", []uint64{17}, Allow},         // fork
		{"clone", []uint64{0x10000011}, ErrnoPerm},
		{"clone", []uint64{0x00020011}, ErrnoPerm},
		{"clone3", []uint64{0, 88}, Allow},
		{"unshare", []uint64{0x200}, Allow}, // CLONE_FS
		{"unshare", []uint64{0x10000000}, ErrnoPerm},
		{"unshare", []uint64{0x80}, ErrnoPerm}, // CLONE_NEWTIME
		{"unshare", []uint64{0x40000200}, ErrnoPerm},
		{"personality", []uint64{0xffffffff}, Allow},
		{"personality", []uint64{8}, Allow},
		{"personality", []uint64{0x40000}, ErrnoPerm}, // ADDR_NO_RANDOMIZE
		{"ioctl", []uint64{0, 0x5401}, Allow},         // TCGETS
		{"ioctl", []uint64{0, 0x5412}, ErrnoPerm},     // TIOCSTI
		{"ioctl", []uint64{0, 0x5412 | high}, ErrnoPerm},
		{"ioctl", []uint64{0, 0x541c}, ErrnoPerm},     // TIOCLINUX
		{"ioctl", []uint64{0, 0xc0c0586d}, ErrnoPerm}, // XFS_IOC_SWAPEXT
		{"ioctl", []uint64{0, 0x40285881}, ErrnoPerm}, // XFS_IOC_EXCHANGE_RANGE
		{"ioctl", []uint64{0, 0x40585883}, ErrnoPerm}, // XFS_IOC_COMMIT_RANGE
		{"ioctl", []uint64{0, 0xc028660f}, ErrnoPerm}, // EXT4_IOC_MOVE_EXT
		{"ioctl", []uint64{0, 0x5000940e}, ErrnoPerm}, // BTRFS_IOC_SUBVOL_CREATE
		{"ioctl", []uint64{0, 0xc4009420}, ErrnoPerm}, // BTRFS_IOC_BALANCE_V2
		{"ioctl", []uint64{0, 0x40049409}, Allow},     // FICLONE
		{"ioctl", []uint64{0, 0x4020940d}, Allow},     // FICLONERANGE
		{"ioctl", []uint64{0, 0xc020660b}, Allow},     // FS_IOC_FIEMAP
	} {
		in := call{nr: syscallNumbers[c.name], arch: archX8664}
		copy(in.args[:], c.args)
		if got, _ := run(t, prog, in); got != c.want {
			t.Errorf("%s(%#x): %#x, want %#x", c.name, c.args, got, c.want)
		}
	}
}

// The kernel's own checker wants every jump forward and inside, and a return at the end.
func TestProgramIsWellFormed(t *testing.T) {
	prog := program(t)
	n := len(prog) / 8
	e := binary.NativeEndian
	for pc := range n {
		i := prog[pc*8:]
		switch code := e.Uint16(i); code {
		case opJeq, opJge:
			if pc+1+int(i[2]) >= n || pc+1+int(i[3]) >= n {
				t.Errorf("instruction %d jumps outside", pc)
			}
		case opJump:
			if pc+1+int(e.Uint32(i[4:])) >= n {
				t.Errorf("instruction %d jumps outside", pc)
			}
		case opLoad:
			if k := e.Uint32(i[4:]); k%4 != 0 || k >= 64 {
				t.Errorf("instruction %d loads from %d", pc, k)
			}
		}
	}
	if e.Uint16(prog[(n-1)*8:]) != opRet {
		t.Error("the last instruction is no return")
	}
}

// Long trees need jumps over more than 255 instructions.
func TestLongTree(t *testing.T) {
	p := Profile{}
	for nr := range uint32(900) {
		p[nr*2] = Rule{Otherwise: errno | Action(nr%200+2)}
	}
	ins, err := compile(p)
	if err != nil {
		t.Fatal(err)
	}
	prog := encode(ins)
	for nr := range uint32(2000) {
		c := call{nr: nr, arch: archX8664}
		if got, _ := run(t, prog, c); got != expected(p, c) {
			t.Fatalf("call %d: %#x, want %#x", nr, got, expected(p, c))
		}
	}
}

func TestTooLongProgramIsRefused(t *testing.T) {
	p := Profile{}
	for nr := range uint32(5000) {
		p[nr*2] = Rule{Otherwise: Allow}
	}
	if _, err := compile(p); err == nil {
		t.Error("compiled more than the kernel takes")
	}
}

func TestOtherArchitecture(t *testing.T) {
	_, err := SeccompProgram("arm64")
	if sandbox.ClassOf(err) != sandbox.Unsupported || !strings.Contains(err.Error(), "arm64") {
		t.Errorf("%v", err)
	}
}

func FuzzProgram(f *testing.F) {
	prog, p := program(f), DefaultProfile()
	f.Add(uint32(41), uint32(archX8664), uint64(40), uint64(1), uint64(0))
	f.Add(uint32(16), uint32(archX8664), uint64(0), uint64(0x5412), uint64(0))
	f.Fuzz(func(t *testing.T, nr, arch uint32, a, b, c uint64) {
		in := call{nr: nr, arch: arch, args: [6]uint64{a, b, c}}
		if got, _ := run(t, prog, in); got != expected(p, in) {
			t.Errorf("%+v: %#x, want %#x", in, got, expected(p, in))
		}
	})
}
