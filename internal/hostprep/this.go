package hostprep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"dsec/internal/linux"
)

// This is the machine that this runs on, with its record in a file.
func This(record string) (*Host, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("only root can change this host's settings; run it as root")
	}
	boot, err := linux.BootID()
	if err != nil {
		return nil, err
	}
	return &Host{Sysctls: "/proc/sys", Record: record, BootID: boot, Run: runProgram, Modules: loadedModules}, nil
}

// runProgram runs a program that ends with this process: one that outlived it could make a swap file after Restore has
// removed it.
func runProgram(ctx context.Context, name string, args ...string) error {
	runtime.LockOSThread() // the signal comes when the thread that started it ends
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil && len(out) > 0 {
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(out[:min(len(out), 500)])))
	}
	return err
}

func loadedModules() (map[string]bool, error) {
	b, err := os.ReadFile("/proc/modules")
	if os.IsNotExist(err) { // a kernel without modules
		return nil, nil
	}
	loaded := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		name, _, _ := strings.Cut(line, " ")
		loaded[name] = true
	}
	return loaded, err
}
