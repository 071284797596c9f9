package aether

import (
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

// A failure is an answer to the edge: a code, and words that a user may read.
type failure struct {
	code    aetherv1.Code
	message string
	errno   unix.Errno
}

func (f *failure) Error() string { return f.message }

func failf(code aetherv1.Code, format string, args ...any) *failure {
	return &failure{code: code, message: fmt.Sprintf(format, args...)}
}

var codeOfErrno = map[unix.Errno]aetherv1.Code{
	unix.ENOENT: aetherv1.Code_CODE_NOT_FOUND,
	unix.EACCES: aetherv1.Code_CODE_PERMISSION, unix.EPERM: aetherv1.Code_CODE_PERMISSION, unix.EROFS: aetherv1.Code_CODE_READ_ONLY,
	unix.EISDIR: aetherv1.Code_CODE_IS_DIRECTORY, unix.ENOTDIR: aetherv1.Code_CODE_NOT_DIRECTORY,
	unix.EEXIST: aetherv1.Code_CODE_EXISTS, unix.E2BIG: aetherv1.Code_CODE_TOO_LARGE,
	unix.ENOSPC: aetherv1.Code_CODE_NO_SPACE, unix.EDQUOT: aetherv1.Code_CODE_QUOTA, unix.EFBIG: aetherv1.Code_CODE_FILE_TOO_LARGE,
	unix.ENOTEMPTY: aetherv1.Code_CODE_NOT_EMPTY, unix.EXDEV: aetherv1.Code_CODE_CROSS_DEVICE, unix.EMLINK: aetherv1.Code_CODE_TOO_MANY_LINKS,
	unix.EBUSY: aetherv1.Code_CODE_BUSY, unix.ETXTBSY: aetherv1.Code_CODE_BUSY, unix.ENAMETOOLONG: aetherv1.Code_CODE_NAME_TOO_LONG,
	unix.EAGAIN: aetherv1.Code_CODE_RESOURCES, unix.ENOMEM: aetherv1.Code_CODE_RESOURCES,
	unix.EMFILE: aetherv1.Code_CODE_RESOURCES, unix.ENFILE: aetherv1.Code_CODE_RESOURCES,
	unix.ELOOP: aetherv1.Code_CODE_INVALID, unix.EINVAL: aetherv1.Code_CODE_INVALID,
	unix.EIO: aetherv1.Code_CODE_IO,
}

// asFailure turns any error into an answer. Errors of the kernel keep their number.
func asFailure(doing string, err error) *failure {
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		code, ok := codeOfErrno[errno]
		if !ok {
			code = aetherv1.Code_CODE_INTERNAL
		}
		return &failure{code: code, message: doing + ": " + errno.Error(), errno: errno}
	}
	return failf(aetherv1.Code_CODE_INTERNAL, "%s: %v", doing, err)
}

// asDiskFailure is asFailure for what makes p: it tells a disk without room for more files from one that is full.
func asDiskFailure(doing string, err error, p string) *failure {
	f := asFailure(doing, err)
	if f.errno != unix.ENOSPC {
		return f
	}
	ref, err := openRef(p, 0)
	for ; err != nil && len(p) > 1; ref, err = openRef(p, 0) {
		p = path.Dir(path.Clean("/" + p))
	}
	if err != nil {
		return f
	}
	defer unix.Close(ref)
	var st unix.Statfs_t
	if unix.Fstatfs(ref, &st) == nil && st.Files > 0 && st.Ffree == 0 && st.Bavail > 0 {
		f.code = aetherv1.Code_CODE_NO_INODES
	}
	return f
}

func (f *failure) proto() *aetherv1.Error {
	return &aetherv1.Error{Code: f.code, Message: strings.ToValidUTF8(clip(f.message, 1024), "\uFFFD"), Errno: int32(f.errno)}
}

// clip shortens s to n bytes.
func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}

// quoted is a name from a tree or an archive, fit for a message.
func quoted(name string) string { return strconv.Quote(clip(name, 256)) }

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}
