package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// etcFiles are bound over the image's, from the upper's directory etc. Their order is that of stage's table.
var etcFiles = [...]string{"hosts", "hostname", "resolv.conf"}

// resolvConf is for names that are not in /etc/hosts: they do not exist, and that shall cost no time. There is no name server on
// the loopback, which glibc and others notice at once; musl's resolver does not, and waits for as long as timeout says.
const resolvConf = "# Names that the network rules allow are in /etc/hosts; there are no others.\nnameserver 127.0.0.1\noptions timeout:0 attempts:1\n"

// The names of network rules stand between these lines of /etc/hosts. All else in it is whoever's inside.
const (
	namesBegin = "# Names of the network rules; what stands here is replaced.\n"
	namesEnd   = "# End of the names of the network rules.\n"
	maxHosts   = 1 << 20 // bytes of a file that is kept around the names
)

// withNames puts lines between the marks of a hosts file, at its end if it has none.
func withNames(file, lines string) string {
	before, rest, found := strings.Cut(file, namesBegin)
	_, after, closed := strings.Cut(rest, namesEnd)
	if !found || !closed {
		before, after = strings.ReplaceAll(file, namesBegin, ""), ""
		if before != "" && !strings.HasSuffix(before, "\n") {
			before += "\n"
		}
		if lines == "" {
			return before
		}
	}
	return before + namesBegin + lines + namesEnd + after
}

var _ driver.HostsWriter = (*Driver)(nil)

// WriteHosts changes the file in place, since it is bind-mounted: a reader inside may see it half changed. Root inside owns
// it, and may have made it anything that a file can be, but it is this file: its directory is not in the sandbox.
func (d *Driver) WriteHosts(_ context.Context, _ driver.Handle, fs rootfs.Container, lines string) error {
	path := filepath.Join(fs.Upper.Dir, "etc", etcFiles[0])
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0) // or a lease held inside would hold us up
	if err != nil {
		return fmt.Errorf("open the sandbox's hosts: %w", err)
	}
	defer f.Close()
	old, err := io.ReadAll(io.LimitReader(f, maxHosts+1))
	if err != nil {
		return fmt.Errorf("read the sandbox's hosts: %w", err)
	}
	if len(old) > maxHosts {
		return sandbox.Errorf(sandbox.FailedPrecondition, "hosts_too_large", "the sandbox's /etc/hosts is larger than %d bytes", maxHosts)
	}
	content := withNames(string(old), lines)
	if content == string(old) {
		return nil
	}
	if _, err := f.WriteAt([]byte(content), 0); err != nil {
		return fmt.Errorf("write the sandbox's hosts: %w", err)
	}
	if err := f.Truncate(int64(len(content))); err != nil {
		return fmt.Errorf("write the sandbox's hosts: %w", err)
	}
	return nil
}

// buildEtc makes the files that belong to the sandbox and not to its difference, and mounts of them. It returns a bit
// per file.
func (d *Driver) buildEtc(b *built, spec driver.Spec, userNS int) (uint32, error) {
	dir := filepath.Join(spec.Rootfs.Upper.Dir, "etc")
	content := [len(etcFiles)]string{
		withNames("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t"+spec.Hostname+"\n", spec.Hosts),
		spec.Hostname + "\n",
		resolvConf,
	}
	var bits uint32
	for i, name := range etcFiles {
		path := filepath.Join(dir, name)
		if err := writeNew(path, content[i]); err != nil {
			return 0, err
		}
		fd, err := linux.CloneMountWith(path, linux.MountAttr{
			Set: linux.MountNoDev | linux.MountNoSUID | linux.MountNoExec, UserNS: userNS})
		if err := b.put(fdEtc+i, fd, err); err != nil {
			return 0, fmt.Errorf("file of the sandbox: %w", err)
		}
		bits |= 1 << i
	}
	return bits, nil
}

// writeNew makes a file, unless an earlier step has made it.
func writeNew(path, content string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err == nil {
		_, err = f.WriteString(content)
		err = errors.Join(err, f.Close())
	}
	if linux.IsQuotaFull(err) {
		return sandbox.Errorf(sandbox.ResourceExhausted, "disk_full",
			"the sandbox's disk cannot hold its first files; ask for a larger disk, or retry elsewhere").WithCause(err)
	}
	if err != nil {
		return fmt.Errorf("write file of the sandbox: %w", err)
	}
	return nil
}
