// Command gotest runs `go test -json` and fails where `go test` would not: on a skipped test that test/skips.txt does not
// list with its reason, and on a run in which no test ran. It prints each package's own closing line, the output of what
// failed, and a closing count.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sort"
	"strings"
	"syscall"
)

type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

type tally struct {
	passed, failed int
	skipped        []string
	output         map[string][]string // of tests and packages that have not passed yet
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	allowed, err := readSkips("test/skips.txt")
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		return 2
	}
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		return 2
	}
	// An interrupt reaches the whole process group; go test ends by itself and we report what there is.
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	t := tally{output: make(map[string][]string)}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Println(lines.Text())
			continue
		}
		t.add(e)
	}
	failed := cmd.Wait() != nil
	return t.close(allowed, failed)
}

func (t *tally) add(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		if e.Test == "" && closingLine(e.Output) {
			fmt.Print(e.Output)
			return
		}
		t.output[key] = append(t.output[key], e.Output)
	case "pass":
		if e.Test != "" {
			t.passed++
		}
		delete(t.output, key)
	case "skip":
		if e.Test != "" {
			t.skipped = append(t.skipped, key)
			fmt.Print(strings.Join(t.output[key], ""))
		}
		delete(t.output, key)
	case "fail", "build-fail":
		if e.Test != "" {
			t.failed++
		}
		fmt.Print(strings.Join(t.output[key], ""))
		delete(t.output, key)
	}
}

// closingLine reports whether it is go test's own verdict on a package.
func closingLine(s string) bool {
	return strings.HasPrefix(s, "ok ") || strings.HasPrefix(s, "FAIL\t") || strings.HasPrefix(s, "panic:")
}

func (t *tally) close(allowed map[string]bool, failed bool) int {
	for key, lines := range t.output { // tests that never ended: a panic or a time-out
		if failed {
			fmt.Printf("--- not ended: %s\n%s", key, strings.Join(lines, ""))
		}
	}
	sort.Strings(t.skipped)
	for _, key := range t.skipped {
		if !allowed[key] {
			fmt.Printf("--- SKIP not on the list: %s (a skip is a claim: list it in test/skips.txt with its reason)\n", key)
			failed = failed || os.Getenv("CI") != ""
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", t.passed, t.failed, len(t.skipped))
	if t.passed == 0 {
		fmt.Println("no test ran")
		failed = true
	}
	if failed || t.failed > 0 {
		return 1
	}
	return 0
}

// readSkips reads lines "package Test # reason".
func readSkips(path string) (map[string]bool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	allowed := make(map[string]bool)
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, reason, ok := strings.Cut(line, " # ")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: %q has no reason", path, line)
		}
		allowed[strings.TrimSpace(key)] = true
	}
	return allowed, nil
}
