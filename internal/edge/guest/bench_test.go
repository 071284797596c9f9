package guest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/internal/aether"
	"dsec/internal/aether/config"
	"dsec/sandbox"
)

const childEnv = "DSEC_TEST_AETHER"

// atExit is what tests made once for all.
var atExit []func()

// TestMain turns the test binary into an aether of its own process, for benchmarks.
func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := beAether(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	for _, f := range atExit {
		f()
	}
	os.Exit(code)
}

func beAether() error {
	aether.Tune()
	srv, err := aether.New(aether.Options{
		Config: config.Config{Key: make([]byte, config.KeyLen), Cgroup: config.CgroupNone}, ReapAll: true, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	l, err := net.FileListener(os.NewFile(config.FDListener, "listener"))
	if err != nil {
		return err
	}
	return srv.Serve(context.Background(), l)
}

// benchClient starts an aether in a process of its own. stop ends it and returns the CPU time of it and its commands.
func benchClient(b *testing.B) (c *Client, stop func() time.Duration) {
	b.Helper()
	dir, err := os.MkdirTemp("", "ae")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		b.Fatal(err)
	}
	file, err := l.(*net.UnixListener).File()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	if bin := os.Getenv("DSEC_BENCH_AETHER"); bin != "" { // the real one; needs root
		cmd = exec.Command(bin)
	}
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.ExtraFiles = []*os.File{file, configFile(b)}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	c, err = Connect(testContext(b), Options{ID: "bench", Key: make([]byte, config.KeyLen), OutputDir: filepath.Join(dir, "out"), Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}})
	if err != nil {
		b.Fatal(err)
	}
	return c, func() time.Duration {
		c.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // "signal: killed"
		return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
}

// configFile is what the real aether reads from its config descriptor.
func configFile(b *testing.B) *os.File {
	b.Helper()
	message, err := config.Config{Key: make([]byte, config.KeyLen), Cgroup: config.CgroupNone}.Encode()
	if err != nil {
		b.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	if _, err := w.Write(message); err != nil {
		b.Fatal(err)
	}
	w.Close()
	return r
}

func selfCPU() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		panic(err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func spread(b *testing.B, workers int, f func() error) {
	var wg sync.WaitGroup
	next := make(chan struct{}, b.N)
	for range b.N {
		next <- struct{}{}
	}
	close(next)
	for range workers {
		wg.Go(func() {
			for range next {
				if err := f(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkExecTrue is Start to Exit of /bin/true. cpu-us/op is of client, aether and the commands together.
func BenchmarkExecTrue(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("aether/workers=%d", workers), func(b *testing.B) {
			c, stop := benchClient(b)
			ctx := context.Background()
			cmd := sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/", User: me(), Env: map[string]string{"PATH": "/bin"}}
			before := selfCPU()
			b.ResetTimer()
			spread(b, workers, func() error {
				m, err := c.Start(ctx, newID(), cmd)
				if err != nil {
					return err
				}
				if err := m.Wait(ctx); err != nil {
					return err
				}
				if r := m.Result(); r.ExitCode != 0 {
					return fmt.Errorf("%+v", r)
				}
				return nil
			})
			b.StopTimer()
			client := selfCPU() - before
			b.ReportMetric(float64((client+stop()).Microseconds())/float64(b.N), "cpu-us/op")
			b.ReportMetric(float64(client.Microseconds())/float64(b.N), "client-us/op")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "execs/s")
		})
		b.Run(fmt.Sprintf("os-exec/workers=%d", workers), func(b *testing.B) {
			var children sync.Mutex
			var total time.Duration
			before := selfCPU()
			spread(b, workers, func() error {
				cmd := exec.Command("/bin/true")
				err := cmd.Run()
				children.Lock()
				total += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
				children.Unlock()
				return err
			})
			b.StopTimer()
			b.ReportMetric(float64((selfCPU()-before+total).Microseconds())/float64(b.N), "cpu-us/op")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "execs/s")
		})
	}
}
