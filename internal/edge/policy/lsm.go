//go:build linux

package policy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"dsec/internal/linux"
	"dsec/sandbox"
)

// ProbeBPFLSM tries whether this kernel enforces what a BPF program of the security hooks says: it loads one that forbids this
// thread to make directories, and sees whether it does. dir is a scratch directory. An Unsupported error says why not.
// That a kernel lists "bpf" among its security modules does not tell: some load no such program.
func ProbeBPFLSM(dir string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const denied = -1 // EPERM
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "dsec_probe", Type: ebpf.LSM, AttachType: ebpf.AttachLSMMac, AttachTo: "inode_mkdir", License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R6, asm.R1, 3*8, asm.DWord), // what the programs before this one say, behind three arguments
			asm.FnGetCurrentPidTgid.Call(),
			asm.LoadImm(asm.R1, int64(os.Getpid())<<32|int64(linux.ThreadID()), asm.DWord),
			asm.JNE.Reg(asm.R0, asm.R1, "others"),
			asm.Mov.Imm(asm.R0, denied),
			asm.Return(),
			asm.Mov.Reg(asm.R0, asm.R6).WithSymbol("others"),
			asm.Return(),
		},
	})
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_bpf_lsm", "this kernel loads no BPF programs of its security hooks").WithCause(err)
	}
	defer prog.Close()
	attached, err := link.AttachLSM(link.LSMOptions{Program: prog})
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_bpf_lsm", "this kernel attaches no BPF programs to its security hooks").WithCause(err)
	}
	made := filepath.Join(dir, "bpf-lsm")
	denial := os.Mkdir(made, 0o700)
	err = attached.Close()
	if denial == nil {
		return errors.Join(err, os.Remove(made), sandbox.Errorf(sandbox.Unsupported, "no_bpf_lsm",
			"this kernel loads BPF programs of its security hooks and does not ask them; boot with bpf in lsm="))
	}
	if err != nil || !errors.Is(denial, fs.ErrPermission) {
		return errors.Join(err, denial)
	}
	// And without it the same works again.
	return errors.Join(os.Mkdir(made, 0o700), os.Remove(made))
}

const appArmor = "/sys/kernel/security/apparmor"

// ProbeAppArmor tries whether this kernel enforces an AppArmor profile: it loads one that forbids to read a file in dir, and sees
// whether a program under it can. An Unsupported error says why not.
func ProbeAppArmor(ctx context.Context, dir string) (err error) {
	if _, err := os.Stat(filepath.Join(appArmor, "policy")); err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_apparmor", "this kernel has no AppArmor, or it is off; boot with apparmor in lsm=").WithCause(err)
	}
	parser, err := exec.LookPath("apparmor_parser")
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_apparmor_parser", "this kernel has AppArmor, and apparmor_parser is missing; install the package apparmor")
	}
	secret, open := filepath.Join(dir, "secret"), filepath.Join(dir, "open")
	for _, path := range []string{secret, open} {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			return err
		}
		defer os.Remove(path)
	}
	name := fmt.Sprintf("dsec-probe-%d", os.Getpid())
	profile := fmt.Sprintf("profile %s flags=(attach_disconnected) {\n  file,\n  capability,\n  deny %q r,\n}\n", name, secret)
	load := func(action string) error {
		cmd := exec.CommandContext(ctx, parser, "--skip-cache", action)
		cmd.Stdin = strings.NewReader(profile)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apparmor_parser %s: %w: %.500s", action, err, out)
		}
		return nil
	}
	if err := load("--add"); err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_apparmor", "this kernel takes no AppArmor profile").WithCause(err)
	}
	defer func() { err = errors.Join(err, load("--remove")) }()
	read := func(path string) error {
		return exec.CommandContext(ctx, "/bin/sh", "-ec", `printf "exec $1" >/proc/self/attr/exec; exec cat "$2"`, "sh", name, path).Run()
	}
	if err := read(open); err != nil {
		return fmt.Errorf("a program under an AppArmor profile that allows it cannot read a file: %w", err)
	}
	if read(secret) == nil {
		return sandbox.Errorf(sandbox.Unsupported, "no_apparmor", "this kernel takes AppArmor profiles and does not enforce them")
	}
	return nil
}
