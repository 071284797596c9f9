package linux

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// CreateNetns makes a network namespace owned by the initial user namespace and keeps it at path, a new file, by a bind mount.
// setup runs inside it first, on a thread of its own: the namespace appears at path complete or not at all.
func CreateNetns(path string, setup func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare the network namespace: %w", err)
		}
		if err := setup(); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
		if err != nil {
			return err
		}
		_ = f.Close()
		err = retryEINTR(func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") })
		if err != nil {
			_ = os.Remove(path)
			return fmt.Errorf("bind the network namespace to %s: %w", path, err)
		}
		return nil
	})
}

// RemoveNetns gives up what CreateNetns made; that it is not there is no error. The namespace itself ends when no process
// and no mount is in it.
func RemoveNetns(path string) error {
	if err := UnmountPath(path, true); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

// InNetns runs fn on a thread that is inside the network namespace kept at path. /proc/thread-self/net shows that
// namespace there; /proc/self/net and /proc/net do not. fn must not start goroutines that expect to be inside.
func InNetns(path string, fn func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// onThread runs fn on an operating system thread that nothing ran on in a changed state before, and that ends with fn: the
// goroutine ends locked, so that the runtime destroys its thread. The main thread is left alone, because the runtime cannot
// destroy it and all of /proc/self describes it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- onThread(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- fn()
	}()
	return <-done
}

// LinkUp brings up a network interface of the calling thread's network namespace.
func LinkUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket for %s: %w", name, err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("interface name %q: %w", name, err)
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return fmt.Errorf("read the flags of %s: %w", name, err)
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}

// InNetnsFile is InNetns with the namespace as an open file.
func InNetnsFile(ns *os.File, fn func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return fn()
	})
}

// SettleLink makes the kernel see now, and not a little later, that an interface of the calling thread's network namespace has its
// other end: until it does, it drops what is sent.
func SettleLink(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket for %s: %w", name, err)
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{command: unix.ETHTOOL_GLINK}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data *struct{ command, data uint32 }
		_    [16]byte
	}{data: &value}
	if copy(request.name[:unix.IFNAMSIZ-1], name) != len(name) {
		return fmt.Errorf("interface name %q", name)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("look at the link %s: %w", name, errno)
	}
	if value.data == 0 {
		return fmt.Errorf("the link %s has no other end", name)
	}
	return nil
}
