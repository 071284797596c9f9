package aether

import (
	"strconv"
	"strings"
	"time"

	aetherv1 "dsec/api/aether/v1"
)

// Trusted commands tell the truth about a sandbox whose root is hostile. While one runs everything else is stopped; it is
// in control groups of its own, so that a sandbox without memory or pids cannot keep it from starting; and its program
// comes from a directory that the edge handed over. What the sandbox made of its own files is not used: not its shell,
// libraries, PATH, environment, users or dynamic loader.

const (
	maxTrusted     = 32 // at once, those that wait included
	trustedTimeout = 10 * time.Minute

	// toolsFD is the directory of tools in a trusted command and all that it starts, which find it by their PATH.
	toolsFD   = 4
	toolsPath = "/proc/self/fd/4"
)

// spawn gives j to the thread that starts its kind.
func (s *Server) spawn(j job) {
	if !j.req.Trusted {
		s.spawner.jobs <- j
		return
	}
	s.mu.Lock()
	t := s.trusted
	s.mu.Unlock()
	if t == nil {
		j.c.failed(failf(aetherv1.Code_CODE_NO_TOOLS, "this sandbox has got no tools for trusted commands"))
		return
	}
	select {
	case t.jobs <- j:
	default: // the connection's reader does not wait
		j.c.failed(failf(aetherv1.Code_CODE_RESOURCES, "%d trusted commands wait in this sandbox; wait for some to end", maxTrusted))
	}
}

func checkTrusted(req *aetherv1.Start) *failure {
	switch {
	case req.AttachOnly:
		return nil
	case req.Terminal != nil || req.Session != "":
		return failf(aetherv1.Code_CODE_INVALID, "a trusted command has neither terminal nor session")
	case len(req.Argv) > 0 && strings.ContainsRune(req.Argv[0], '/'):
		return failf(aetherv1.Code_CODE_INVALID, "%q is a program of the sandbox, which cannot be trusted; if that is meant, run env with its path as argument", clip(req.Argv[0], 256))
	}
	_, err := numericAccount(req.User)
	if err != nil {
		return asFailure("find the user", err)
	}
	return nil
}

// numericAccount reads "", "root", "uid" and "uid:gid": /etc/passwd is the sandbox's word.
func numericAccount(spec string) (account, error) {
	user, group, hasGroup := strings.Cut(spec, ":")
	if user == "root" || spec == "" {
		user = "0"
	}
	uid, ok := parseID(user)
	acc := account{uid: uid}
	if hasGroup && ok {
		acc.gid, ok = parseID(group)
	}
	if !ok {
		return acc, failf(aetherv1.Code_CODE_NO_USER, "user %q: a trusted command runs as root or by number, since names are the sandbox's word", clip(spec, 64))
	}
	return acc, nil
}

// trustedEnv is what the request gave and the way to the tools.
func trustedEnv(sent []string) []string {
	env := append(make([]string, 0, len(sent)+2), sent...)
	for key, value := range map[string]string{"HOME": "/", "PATH": toolsPath} {
		if !hasEnv(env, key) {
			env = append(env, key+"="+value)
		}
	}
	return env
}

// trustedProgram is one of the tools. They tell by argv[0] which one they are.
func trustedProgram(req *aetherv1.Start) program {
	name, argv := "sh", req.Argv
	switch {
	case req.ScriptFollows:
		argv = []string{name, "-c", ". /proc/self/fd/" + strconv.Itoa(scriptFD)}
	case req.Shell != "":
		argv = []string{name, "-c", req.Shell}
	default:
		name = argv[0]
	}
	return program{tool: true, candidates: []candidate{{toolsPath + "/" + name, argv}}}
}

// giveTools puts the directory of tools where toolsPath leads to.
func (p *pipes) giveTools(dir int) {
	for len(p.child) < toolsFD {
		p.child = append(p.child, ^uintptr(0)) // closed
	}
	p.child = append(p.child, uintptr(dir))
}
