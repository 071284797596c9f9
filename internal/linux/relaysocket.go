package linux

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Sockets of a relay: they stand in a namespace in which every address is local, and answer in the name of any.

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func inetSocket(a netip.AddrPort, kind int, options map[[2]int]int) (int, error) {
	fd, err := unix.Socket(int(family(a.Addr())), kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if a.Addr().Is6() {
		options[[2]int{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY}] = 1
	}
	options[[2]int{unix.SOL_SOCKET, unix.SO_REUSEADDR}] = 1
	for o, v := range options {
		if err := unix.SetsockoptInt(fd, o[0], o[1], v); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("set option %d of level %d: %w", o[1], o[0], err)
		}
	}
	if err := unix.Bind(fd, sockaddr(a)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind to %s: %w", a, err)
	}
	return fd, nil
}

// transparent lets a socket answer in the name of addresses that are not its host's. It needs CAP_NET_ADMIN.
func transparent(a netip.AddrPort) map[[2]int]int {
	if a.Addr().Is4() {
		return map[[2]int]int{{unix.IPPROTO_IP, unix.IP_TRANSPARENT}: 1}
	}
	return map[[2]int]int{{unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT}: 1}
}

// ListenRelay makes a listener in the calling thread's network namespace.
func ListenRelay(a netip.AddrPort, backlog int) (*os.File, error) {
	fd, err := inetSocket(a, unix.SOCK_STREAM, transparent(a))
	if err != nil {
		return nil, err
	}
	if err := unix.Listen(fd, backlog); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "relay"), nil
}

// ListenRelayUDP makes a socket for datagrams to anywhere: Destination reads where each was sent to.
func ListenRelayUDP(a netip.AddrPort) (*os.File, error) {
	options := transparent(a)
	if a.Addr().Is4() {
		options[[2]int{unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR}] = 1
	} else {
		options[[2]int{unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR}] = 1
	}
	fd, err := inetSocket(a, unix.SOCK_DGRAM, options)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "relay"), nil
}

// ConnectRelayUDP makes a socket that has the address local, which need not be the host's, and talks with remote alone.
func ConnectRelayUDP(local, remote netip.AddrPort) (*os.File, error) {
	fd, err := inetSocket(local, unix.SOCK_DGRAM, map[[2]int]int{})
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, sockaddr(remote)); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", remote, err)
	}
	return os.NewFile(uintptr(fd), "relay"), nil
}

// Destination reads from a datagram's control messages where it was sent to.
func Destination(oob []byte) (netip.AddrPort, bool) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for _, m := range messages {
		port := func() uint16 { return binary.BigEndian.Uint16(m.Data[2:]) }
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_ORIGDSTADDR && len(m.Data) >= unix.SizeofSockaddrInet4:
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(m.Data[4:8])), port()), true
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_ORIGDSTADDR && len(m.Data) >= unix.SizeofSockaddrInet6:
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(m.Data[8:24])), port()), true
		}
	}
	return netip.AddrPort{}, false
}

// DropPrivileges makes every thread of the process that user for good, without capabilities and without a way back, in an
// empty directory as its root. Before, it tries to get room for files descriptors, and returns for how many there is.
func DropPrivileges(uid int, root string, files uint64) (uint64, error) {
	limit := unix.Rlimit{Cur: files, Max: files}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil { // fs.nr_open is lower
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return 0, fmt.Errorf("read the limit of files: %w", err)
		}
		limit.Cur = limit.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return 0, fmt.Errorf("raise the limit of files: %w", err)
		}
	}
	if err := unix.Chroot(root); err != nil {
		return 0, fmt.Errorf("chroot to %s: %w", root, err)
	}
	if err := os.Chdir("/"); err != nil {
		return 0, err
	}
	if err := syscall.Setgroups(nil); err != nil {
		return 0, fmt.Errorf("drop groups: %w", err)
	}
	if err := syscall.Setresgid(uid, uid, uid); err != nil {
		return 0, fmt.Errorf("drop the group: %w", err)
	}
	if err := syscall.Setresuid(uid, uid, uid); err != nil { // with it go all capabilities
		return 0, fmt.Errorf("drop the user: %w", err)
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno != 0 {
		return 0, fmt.Errorf("forbid new privileges: %w", errno)
	}
	return limit.Cur, nil
}

// Unsent is how much of what was written to a connection the other end has not acknowledged, in no certain unit: 0 is nothing, as after
// its end.
func Unsent(conn syscall.Conn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	var failed error
	err = raw.Control(func(fd uintptr) {
		info, failed = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, failed
	case info.State == unix.BPF_TCP_CLOSE:
		return 0, nil
	}
	return int(info.Unacked) + int(info.Notsent_bytes), nil
}

// Readable reports whether a read of fd returns at once.
func Readable(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err != nil || n > 0
}

// HasIPv6 reports whether the kernel has IPv6 at all.
var HasIPv6 = sync.OnceValue(func() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
})
