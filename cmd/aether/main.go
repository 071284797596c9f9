// Command aether is PID 1 of a sandbox. It takes no arguments: what it needs are inherited descriptors, listed in
// internal/aether/config. Build it static: CGO_ENABLED=0 go build -trimpath -ldflags "-s -w".
//
// What surprises: nobody sees its standard error but who debugs a launcher, and it exits only if it cannot start.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"

	"dsec/internal/aether"
	"dsec/internal/aether/config"

	"golang.org/x/sys/unix"
)

func init() {
	// The thread-group leader stays with main: the spawner may not have it, and would leave it parked.
	runtime.LockOSThread()
}

func main() {
	runtime.MemProfileRate = 0
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "aether:", err)
		os.Exit(1)
	}
}

func run() error {
	if err := aether.Harden(); err != nil {
		return err
	}
	aether.Tune()
	pipe := os.NewFile(config.FDConfig, "config")
	cfg, err := config.Decode(pipe)
	if err != nil {
		return err
	}
	_ = pipe.Close() // everything has been read
	log := slog.New(slog.NewTextHandler(stderr(2), &slog.HandlerOptions{Level: slog.LevelWarn}))
	keepDescriptors(cfg)
	opts := aether.Options{Config: cfg, CgroupFD: config.FDCgroup, ReapAll: true, Guarded: true, Log: log}
	for i := range cfg.V1Tasks {
		opts.TaskFDs = append(opts.TaskFDs, config.FDTasks+i)
	}
	srv, err := aether.New(opts)
	if err != nil {
		return err
	}
	file := os.NewFile(config.FDListener, "listener")
	listener, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("take the listening socket: %w", err)
	}
	_ = file.Close() // the listener has a duplicate
	return srv.Serve(context.Background(), listener)
}

// keepDescriptors keeps what we inherited from commands.
func keepDescriptors(cfg config.Config) {
	for fd := config.FDListener; fd < config.FDTasks+cfg.V1Tasks; fd++ {
		unix.CloseOnExec(fd)
	}
}
