package linux

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// IsTerminal reports whether fd is a terminal.
func IsTerminal(fd int) bool {
	_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	return err == nil
}

// MakeRaw puts a terminal into raw mode, in which each key is a byte to be read and nothing that is written is changed. restore
// makes it as it was before, and may be called more than once.
func MakeRaw(fd int) (restore func() error, err error) {
	before, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("reading the terminal's mode: %w", err)
	}
	raw := *before
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	// At once: where nobody reads the terminal, what waits to be written waits for ever. What has been typed already stays.
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &raw); err != nil {
		return nil, fmt.Errorf("setting the terminal's mode: %w", err)
	}
	return func() error { return unix.IoctlSetTermios(fd, unix.TCSETS, before) }, nil
}

// WindowSize is the size of a terminal's window in characters; 0 where it has none.
func WindowSize(fd int) (rows, cols uint16, err error) {
	w, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, fmt.Errorf("reading the terminal's size: %w", err)
	}
	return w.Row, w.Col, nil
}
