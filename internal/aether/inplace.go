package aether

import (
	"errors"
	"io"
	"math"
	"os"
	"path"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// openInPlace opens the file itself, at the end or at an offset. What is written stays, whatever happens after it.
func (n *newFile) openInPlace(req *aetherv1.WriteFile, acc account) error {
	if req.Append && req.InPlace {
		return failf(aetherv1.Code_CODE_INVALID, "a file is appended to, or written at an offset")
	}
	if req.Offset > math.MaxInt64 || (req.Size > 0 && uint64(req.Size) > math.MaxInt64-req.Offset) {
		return unix.EFBIG
	}
	flags := unix.O_WRONLY | unix.O_NONBLOCK | unix.O_CLOEXEC | unix.O_NOCTTY
	if req.Append {
		flags |= unix.O_APPEND
	}
	err := asUser(acc, func() error {
		if req.MakeParents {
			if err := makeParents(path.Dir(n.target)); err != nil {
				return err
			}
		}
		for range maxTries {
			if err := n.makeOrOpen(req, flags); req.Exclusive || !errors.Is(err, unix.EEXIST) {
				return err
			}
		}
		return unix.ENOENT // it is a link to nothing
	})
	if err != nil {
		return err
	}
	if req.InPlace {
		if _, err = n.file.Seek(int64(req.Offset), io.SeekStart); errors.Is(err, unix.EINVAL) {
			err = unix.EFBIG
		}
	}
	if err != nil {
		_ = n.file.Close()
	}
	return err
}

// makeOrOpen opens the file that is there, or makes one. Others may make it meanwhile: then EEXIST.
func (n *newFile) makeOrOpen(req *aetherv1.WriteFile, flags int) error {
	ref, err := openRef(n.target, 0)
	if errors.Is(err, unix.ENOENT) {
		return n.makeInPlace(flags)
	}
	if err != nil {
		return err
	}
	defer unix.Close(ref)
	if req.Exclusive {
		return failf(aetherv1.Code_CODE_EXISTS, "it exists")
	}
	var st unix.Stat_t
	if err := unix.Fstat(ref, &st); err != nil {
		return err
	}
	if err := checkRegular(&st); err != nil {
		return err
	}
	if err := checkStored(ref); err != nil {
		return err
	}
	fd, err := unix.Open(refPath(ref), flags, 0)
	if err != nil {
		return err
	}
	n.file = os.NewFile(uintptr(fd), n.target)
	return nil
}

func (n *newFile) makeInPlace(flags int) error {
	mode := n.mode
	if mode == 0 {
		mode = 0o644
	}
	fd, err := openat2(n.target, flags|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		_ = unix.Close(fd)
		return err
	}
	n.file = os.NewFile(uintptr(fd), n.target)
	return nil
}
