//go:build linux

package policy

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"dsec/sandbox"
)

// A device is a rule of the device program. A minor of anyMinor stands for all.
type device struct {
	major, minor int32
}

const anyMinor = -1

// allowedDevices are null, zero, full, random, urandom, tty, ptmx and the terminals of devpts.
var allowedDevices = []device{{1, 3}, {1, 5}, {1, 7}, {1, 8}, {1, 9}, {5, 0}, {5, 2}, {136, anyMinor}}

const (
	deviceProgramName = "dsec_devices"

	// struct bpf_cgroup_dev_ctx: access_type is access<<16 | type.
	ctxAccessType, ctxMajor, ctxMinor = 0, 4, 8
	typeMask, typeChar                = 0xffff, 2
	accessShift, accessMknod          = 16, 1
)

// deviceInstructions allow reading and writing the character devices above and nothing else. mknod of any device is refused;
// whiteouts (char 0:0) never come here.
func deviceInstructions() asm.Instructions {
	ins := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, ctxAccessType, asm.Word),
		asm.LoadMem(asm.R4, asm.R1, ctxMajor, asm.Word),
		asm.LoadMem(asm.R5, asm.R1, ctxMinor, asm.Word),
		asm.Mov.Reg(asm.R3, asm.R2),
		asm.And.Imm(asm.R3, typeMask),
		asm.JNE.Imm(asm.R3, typeChar, "refuse"),
		asm.RSh.Imm(asm.R2, accessShift),
		asm.And.Imm(asm.R2, accessMknod),
		asm.JNE.Imm(asm.R2, 0, "refuse"),
	}
	for i, d := range allowedDevices {
		next := fmt.Sprintf("not_%d", i)
		ins = append(ins, asm.JNE.Imm(asm.R4, d.major, next))
		if d.minor != anyMinor {
			ins = append(ins, asm.JNE.Imm(asm.R5, d.minor, next))
		}
		ins = append(ins, asm.Ja.Label("allow"),
			asm.Mov.Imm(asm.R0, 0).WithSymbol(next)) // a target needs an instruction
	}
	return append(ins,
		asm.Ja.Label("refuse"),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("allow"),
		asm.Return(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("refuse"),
		asm.Return(),
	)
}

// AttachDevices puts the device program on a v2 control group. It holds for every group below, now and later, needs no
// controller, and stays without a process or a file descriptor until the group is removed. Doing it again replaces the
// program in one step, so there is no moment without it.
func AttachDevices(dir string) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         deviceProgramName,
		Type:         ebpf.CGroupDevice,
		Instructions: deviceInstructions(),
		License:      "Apache-2.0",
	})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return sandbox.Errorf(sandbox.Unsupported, "no_device_program",
			"this kernel has no BPF programs for devices in control groups (CONFIG_CGROUP_BPF)").WithCause(err)
	}
	if err != nil {
		return fmt.Errorf("load device program: %w", err)
	}
	defer prog.Close()
	group, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open control group for devices: %w", err)
	}
	defer group.Close()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(group.Fd()), Program: prog, Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		return fmt.Errorf("attach device program to %s: %w", dir, err)
	}
	return nil
}

// DetachDevices takes the programs off again. A group without one, or one that is gone, is no error.
func DetachDevices(dir string) error {
	group, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open control group for devices: %w", err)
	}
	defer group.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(group.Fd()), Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		return fmt.Errorf("list device programs of %s: %w", dir, err)
	}
	for _, a := range attached.Programs {
		prog, err := ebpf.NewProgramFromID(a.ID)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open device program: %w", err)
		}
		err = link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(group.Fd()), Program: prog, Attach: ebpf.AttachCGroupDevice})
		prog.Close()
		if err != nil {
			return fmt.Errorf("detach device program of %s: %w", dir, err)
		}
	}
	return nil
}
