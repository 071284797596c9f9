package aether

import (
	"errors"
	"path"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const (
	defaultTerm = "xterm-256color"
	defaultLang = "C.UTF-8"
	maxWindow   = 1<<16 - 1

	// ptyHeld is the most that a terminal holds of what was written to it: 8 KiB on their way and 4 KiB to be read.
	ptyHeld = 16 << 10
)

// A window is the size of a command's terminal; both are 0 where it has none.
type window struct{ rows, cols uint32 }

// A terminal is our ends of a PTY. The slave stays open as long as the command's own process runs: a program that closes
// its descriptors and opens /dev/tty later does not end the output.
type terminal struct {
	master, input int // the same one twice, non-blocking: it is closed, and what is left hung up, when both are
	slave         int
}

// openTerminal makes a PTY in the sandbox's own devpts. What /dev/ptmx is, root inside may have decided: it is looked at, and
// the slave comes from the master, not by a path.
func openTerminal(device string, size window, acc account) (*terminal, error) {
	t := &terminal{master: -1, input: -1, slave: -1}
	err := t.open(device, size, acc)
	if err != nil {
		t.close()
		if errors.Is(err, unix.ENOSPC) {
			return nil, failf(aetherv1.Code_CODE_NO_TERMINALS, "all terminals of the sandbox, or of its node, are taken; end commands that have one, or run it without")
		}
		return nil, err
	}
	return t, nil
}

func (t *terminal) open(device string, size window, acc account) error {
	var err error
	if t.master, err = unix.Open(device, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
		if errors.Is(err, unix.ENOSPC) {
			return err
		}
		return failf(aetherv1.Code_CODE_NO_TERMINALS, "the sandbox has no terminals: open %s: %v", device, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(t.master, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(5, 2) {
		return failf(aetherv1.Code_CODE_NO_TERMINALS, "the sandbox has no terminals: %s is something else there", device)
	}
	if err := unix.IoctlSetPointerInt(t.master, unix.TIOCSPTLCK, 0); err != nil {
		return err
	}
	if t.slave, err = openPeer(t.master); err != nil {
		return err
	}
	if t.input, err = unix.FcntlInt(uintptr(t.master), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return err
	}
	if !acc.sameRights() { // the group stays tty's, as mesg and write want it
		if err := unix.Fchown(t.slave, int(acc.uid), -1); err != nil {
			return err
		}
	}
	if err := understandUTF8(t.slave); err != nil {
		return err
	}
	return setWindow(t.slave, size)
}

// openPeer opens the slave of a master.
func openPeer(master int) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// understandUTF8 lets the line discipline erase characters, not bytes.
func understandUTF8(fd int) error {
	tio, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return err
	}
	tio.Iflag |= unix.IUTF8
	return unix.IoctlSetTermios(fd, unix.TCSETS, tio)
}

func setWindow(fd int, w window) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(w.rows), Col: uint16(w.cols)})
}

func (t *terminal) close() {
	for _, fd := range []int{t.master, t.input, t.slave} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// checkTerminal refuses windows that no terminal has.
func checkTerminal(rows, cols uint32) *failure {
	if rows == 0 || cols == 0 || rows > maxWindow || cols > maxWindow {
		return failf(aetherv1.Code_CODE_INVALID, "a terminal of %d rows and %d columns; each must be 1 to %d", rows, cols, maxWindow)
	}
	return nil
}

// resize sets the window of a running command; its foreground processes get SIGWINCH. To an ended one it does nothing.
func (s *Server) resize(req *aetherv1.Resize) error {
	if f := checkTerminal(req.Rows, req.Cols); f != nil {
		return f
	}
	s.mu.Lock()
	c := s.commands[req.CommandId]
	s.mu.Unlock()
	if c == nil {
		return failf(aetherv1.Code_CODE_NOT_FOUND, "no command %q", clip(req.CommandId, 64))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.window == window{}:
		return failf(aetherv1.Code_CODE_INVALID, "the command has no terminal")
	case c.slave >= 0:
		return setWindow(c.slave, window{req.Rows, req.Cols})
	}
	c.window = window{req.Rows, req.Cols} // before its start
	return nil
}

// windowNow is the size with which the terminal is to be made.
func (c *command) windowNow() window {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.window
}

// closeSlave lets the output end with whoever else has the terminal. c.mu is held.
func (c *command) closeSlave() {
	if c.slave >= 0 {
		unix.Close(c.slave)
		c.slave = -1
	}
}

// foreground is the process group that the terminal's keys would signal, or 0. c.mu is held.
func (c *command) foreground() int {
	group := 0
	c.out[0].control(func(fd int) {
		if n, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err == nil {
			group = n
		}
	})
	return group
}

// endOfInput is what a person would type for it: VEOF, and once more behind a line that has no end yet, which the first
// one only passes on. In raw mode there is nothing that means it. The answer is not nil.
func endOfInput(master int, last byte) []byte {
	tio, err := unix.IoctlGetTermios(master, unix.TCGETS)
	if err != nil || tio.Lflag&unix.ICANON == 0 || tio.Cc[unix.VEOF] == 0 {
		return []byte{}
	}
	eof := []byte{tio.Cc[unix.VEOF]}
	if last != 0 && last != '\n' && last != '\r' {
		eof = append(eof, tio.Cc[unix.VEOF])
	}
	return eof
}

// loginShells are the user's shell, where it is one, bash and sh, each told by its name to be a login shell.
func loginShells(acc account) []candidate {
	shells := []string{"/bin/bash", "/bin/sh"}
	switch name := path.Base(acc.shell); {
	case !path.IsAbs(acc.shell), name == "nologin", name == "false":
	default:
		shells = append([]string{acc.shell}, shells...)
	}
	var out []candidate
	for _, sh := range shells {
		out = append(out, candidate{sh, []string{"-" + path.Base(sh)}})
	}
	return out
}
