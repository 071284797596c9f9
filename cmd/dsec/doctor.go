package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/config"
)

// A verdict is what the doctor says of one thing.
type verdict string

const (
	verdictOK   verdict = "ok"
	verdictWarn verdict = "warn" // it works, with less
	verdictFail verdict = "fail"
)

// A finding is one line of the doctor's report.
type finding struct {
	Verdict verdict `json:"verdict"`
	Subject string  `json:"subject"` // what was looked at, for example "overlayfs"
	Detail  string  `json:"detail"`  // what was found
	Advice  string  `json:"advice,omitempty"`
	// Of a feature that this host does not have in the best way: what that is, why not, and what doing without costs.
	Instead string `json:"instead_of,omitempty"`
	Why     string `json:"why,omitempty"`
	Cost    string `json:"cost,omitempty"`
}

// text is all that is said of it, on one line.
func (f finding) text() string {
	text := f.Detail
	if f.Instead != "" {
		text += fmt.Sprintf(" (instead of %s: %s; cost: %s)", f.Instead, f.Why, f.Cost)
	}
	if f.Advice != "" {
		text += "; " + f.Advice
	}
	return text
}

// A doctorCheck looks at one part of this host.
type doctorCheck func(ctx context.Context) []finding

// doctorChecks are the checks of the parts that run on this machine; tests replace them.
var doctorChecks = []doctorCheck{checkHost}

var doctorCommand = command{
	name: "doctor", group: groupDiagnosis,
	summary: "check this host, the configuration and the platform",
	details: `Each line is ok, warn (it works, with less) or fail, with what to do; a feature that this host has only in a second-best way says
instead of what, why and what that costs. Exits with 1 if a line fails, with --strict also if one warns. With --json each is one
line {"verdict","subject","detail","advice","instead_of","why","cost"}. Checks that need root are reported as such for other users.

  dsec doctor --json | jq -r 'select(.verdict=="fail")'
  dsec doctor --json | jq -r 'select(.instead_of) | [.subject, .detail, .why] | @tsv'`,
	setup: setupDoctor,
}

func setupDoctor(f *flagSet) action {
	contextName := contextFlag(f)
	var asJSON, strict bool
	jsonFlag(f, &asJSON, "print one line of JSON for each finding")
	f.BoolVar(&strict, "strict", false, "exit with 1 also if a line warns")
	return func(ctx context.Context, c *console, args []string) error {
		if err := wantArgs(args, 0, 0, ""); err != nil {
			return err
		}
		findings := []finding{checkSystem(runtime.GOOS, runtime.GOARCH)}
		for _, check := range doctorChecks {
			findings = append(findings, check(ctx)...)
		}
		findings = append(findings, checkConfig(c.getenv))
		findings = append(findings, c.checkPlatform(ctx, *contextName)...)
		if err := ctx.Err(); err != nil {
			return err
		}
		return c.printFindings(findings, asJSON, strict)
	}
}

func (c *console) printFindings(findings []finding, asJSON, strict bool) error {
	failed := false
	t := newTable()
	for _, f := range findings {
		failed = failed || f.Verdict == verdictFail || strict && f.Verdict == verdictWarn
		if asJSON {
			if err := c.printJSON(f); err != nil {
				return err
			}
			continue
		}
		t.row(string(f.Verdict), f.Subject, f.text())
	}
	if !asJSON {
		if err := t.print(c); err != nil {
			return err
		}
	}
	if failed {
		return &exitError{code: exitFailure}
	}
	return nil
}

// checkSystem says whether sandboxes can run on this operating system at all.
func checkSystem(system, arch string) finding {
	f := finding{Verdict: verdictOK, Subject: "system", Detail: system + "/" + arch}
	if system != "linux" || arch != "amd64" {
		f.Verdict = verdictWarn
		f.Advice = "sandboxes run on linux/amd64 only; from here a platform elsewhere can be used"
		return f
	}
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		f.Detail += ", kernel " + strings.TrimSpace(string(release))
	}
	return f
}

// checkConfig looks at the user's config file.
func checkConfig(getenv func(string) string) finding {
	f := finding{Verdict: verdictOK, Subject: "config"}
	path, err := config.Path(getenv)
	if err != nil {
		f.Verdict, f.Detail = verdictWarn, userMessage(err)
		return f
	}
	c, err := config.Load(path)
	if err != nil {
		f.Verdict, f.Detail = verdictFail, userMessage(err)
		return f
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Detail = path + " is not there"
		if getenv(config.EnvURL) == "" {
			f.Verdict, f.Advice = verdictWarn, "`dsec up` makes it"
		}
		return f
	case err != nil:
		f.Verdict, f.Detail = verdictFail, err.Error()
		return f
	case info.Mode().Perm()&0o077 != 0:
		f.Verdict = verdictWarn
		f.Detail = fmt.Sprintf("others can read the keys in %s", path)
		f.Advice = "chmod 600 " + path
		return f
	}
	f.Detail = fmt.Sprintf("%s, contexts: %d, current: %q", path, len(c.Contexts), c.Current)
	return f
}

// checkPlatform asks the configured platform how it is.
func (c *console) checkPlatform(ctx context.Context, contextName string) []finding {
	bad := func(err error) []finding {
		return []finding{{Verdict: verdictFail, Subject: "platform", Detail: userMessage(err)}}
	}
	cl, err := c.dial(contextName)
	if err != nil {
		return bad(err)
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	info, err := cl.Info(ctx)
	if err != nil {
		return bad(err)
	}
	findings := []finding{{Verdict: verdictOK, Subject: "platform",
		Detail: fmt.Sprintf("%s at %s, as %s in project %s", info.GetVersion(), cl.Describe(), info.GetPrincipal(), info.GetProject())}}
	if len(info.GetNodes()) == 0 {
		return append(findings, finding{Verdict: verdictFail, Subject: "nodes", Detail: "the platform has no node", Advice: "start one with `dsec up` or `dsec edge`"})
	}
	for _, n := range info.GetNodes() {
		findings = append(findings, checkNode(n))
	}
	return findings
}

func checkNode(n *dsecv1.Node) finding {
	f := finding{Verdict: verdictOK, Subject: "node " + n.GetId(),
		Detail: fmt.Sprintf("%d of %d sandboxes, %s of %s memory available, %g CPUs, %s", n.GetSandboxes(), n.GetCapacity(),
			byteSize(n.GetMemoryAvailableBytes()), byteSize(n.GetMemoryBytes()), n.GetCpus(), strings.Join(n.GetBackends(), ", "))}
	if n.GetReason() != "" {
		f.Verdict, f.Advice = verdictWarn, n.GetReason()
	}
	if !n.GetHealthy() {
		f.Verdict = verdictFail
	}
	return f
}
