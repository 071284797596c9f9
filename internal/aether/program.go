package aether

import (
	"errors"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	aetherv1 "dsec/api/aether/v1"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// scriptFD is where a shell finds a script that is too long for an argument.
const scriptFD = 3

// A program is what is executed: candidates are tried in turn, the next where one does not exist.
type program struct {
	candidates []candidate
	shell      bool
	tool       bool // of a trusted command
}

// missing is the answer if no candidate exists.
func (p program) missing() *failure {
	if p.tool {
		return failf(aetherv1.Code_CODE_NOT_FOUND, "there is no trusted tool %q; `busybox --list` in a trusted script names them", clip(path.Base(p.candidates[0].path), 256))
	}
	if p.shell {
		return failf(aetherv1.Code_CODE_NO_SHELL, "the image has neither /bin/bash nor /bin/sh; use exec with a program that it has")
	}
	return failf(aetherv1.Code_CODE_NOT_FOUND, "%q does not exist in the sandbox", clip(p.candidates[0].path, 256))
}

type candidate struct {
	path string
	argv []string
}

// programOf decides what a request executes. With names without a slash it looks, with acc's rights, into the PATH that
// the command itself will have.
func programOf(req *aetherv1.Start, env []string, acc account) (program, error) {
	if req.Shell != "" || req.ScriptFollows {
		return shellProgram(req), nil
	}
	if len(req.Argv) == 0 {
		return program{shell: true, candidates: loginShells(acc)}, nil
	}
	name := req.Argv[0]
	if !strings.Contains(name, "/") {
		found, err := lookPath(name, envValue(env, "PATH"), req.Cwd, acc)
		if err != nil {
			return program{}, err
		}
		name = found
	}
	return program{candidates: []candidate{{name, req.Argv}}}, nil
}

// shellProgram runs a script by bash, else sh, neither as a login shell. $0 is "bash" or "sh". A long script is sourced
// from a pipe that the shell closes first; unlike with -c, `return` at the top level then ends it without an error.
func shellProgram(req *aetherv1.Start) program {
	script := req.Shell
	if req.ScriptFollows {
		script = ". /proc/self/fd/3"
	}
	return program{
		shell:      true,
		candidates: []candidate{{"/bin/bash", []string{"bash", "-c", script}}, {"/bin/sh", []string{"sh", "-c", script}}},
	}
}

// lookPath finds name in searchPath as the command would.
func lookPath(name, searchPath, cwd string, acc account) (string, error) {
	var found string
	denied := false
	err := asUser(acc, func() error {
		for _, dir := range strings.Split(searchPath, ":") {
			if !path.IsAbs(dir) { // POSIX: an empty element is the working directory
				dir = path.Join(cwd, dir)
			}
			p := dir + "/" + name
			switch err := checkExecutable(p); {
			case err == nil:
				found = p
				return nil
			case errors.Is(err, unix.EACCES):
				denied = true
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return "", asFailure("take the user's rights", err)
	case found != "":
		return found, nil
	case denied:
		return "", failf(aetherv1.Code_CODE_NOT_EXECUTABLE, "%q is in the command's PATH but its user may not execute it", clip(name, 256))
	}
	return "", failf(aetherv1.Code_CODE_NOT_FOUND, "%q was not found in the command's PATH %q", clip(name, 256), clip(searchPath, 256))
}

// checkExecutable is EACCES also for what is not a regular file.
func checkExecutable(p string) error {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EACCES
	}
	return unix.Faccessat2(unix.AT_FDCWD, p, unix.X_OK, unix.AT_EACCESS)
}

// explain finds out what an error of fork and exec was about. The kernel gives one number for the program and its
// interpreter; looking again afterwards costs nothing where all is well.
func explain(err error, p string, acc account) *failure {
	f := asFailure("start the command", err)
	switch {
	case f.errno == unix.E2BIG:
		f.message = "arguments and environment are over the kernel's limit; pass them by stdin or in a file"
		return f
	case f.code == aetherv1.Code_CODE_RESOURCES:
		f.message = "the sandbox has no room for another process (pids or memory limit): " + f.errno.Error()
		return f
	}
	var st unix.Stat_t
	exists := asUser(acc, func() error { return unix.Stat(p, &st) }) == nil
	name := clip(p, 256)
	switch {
	case exists && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return &failure{aetherv1.Code_CODE_NOT_EXECUTABLE, name + " is a directory", f.errno}
	case f.errno == unix.ENOENT && exists:
		return &failure{aetherv1.Code_CODE_NOT_EXECUTABLE, name + " exists, but the interpreter or loader that it names does not", f.errno}
	case f.errno == unix.ENOENT || f.errno == unix.ENOTDIR:
		return &failure{aetherv1.Code_CODE_NOT_FOUND, name + " does not exist in the sandbox", f.errno}
	case f.errno == unix.EACCES || f.errno == unix.EPERM:
		return &failure{aetherv1.Code_CODE_NOT_EXECUTABLE, name + " is not executable for the command's user", f.errno}
	case f.errno == unix.ENOEXEC || f.errno == unix.ELIBBAD || f.errno == unix.EINVAL:
		return &failure{aetherv1.Code_CODE_NOT_EXECUTABLE, name + " is not in a format that the kernel executes; a script needs a #! line, or run it by a shell", f.errno}
	case f.errno == unix.ETXTBSY:
		return &failure{aetherv1.Code_CODE_NOT_EXECUTABLE, name + " is open for writing", f.errno}
	}
	return f
}

// environment completes what the edge sent: the sandbox's defaults, then what a login would set.
func environment(sent []string, defaults map[string]string, acc account) []string {
	env := make([]string, 0, len(sent)+len(defaults)+5)
	env = append(env, sent...)
	add := func(key, value string) {
		if value != "" && !hasEnv(env, key) {
			env = append(env, key+"="+value)
		}
	}
	for k, v := range defaults {
		add(k, v)
	}
	name := acc.name
	home, shell := acc.home, acc.shell
	if home == "" {
		home = "/"
	}
	if shell == "" {
		shell = "/bin/sh"
	}
	add("HOME", home)
	add("USER", name)
	add("LOGNAME", name)
	add("SHELL", shell)
	add("PATH", defaultPath)
	return env
}

// terminalEnv says what programs at a terminal want to know.
func terminalEnv(env []string) []string {
	for _, kv := range [][2]string{{"TERM", defaultTerm}, {"LANG", defaultLang}} {
		if !hasEnv(env, kv[0]) {
			env = append(env, kv[0]+"="+kv[1])
		}
	}
	return env
}

func hasEnv(env []string, key string) bool {
	for _, kv := range env {
		if len(kv) > len(key) && kv[len(key)] == '=' && kv[:len(key)] == key {
			return true
		}
	}
	return false
}

func envValue(env []string, key string) string {
	for _, kv := range env {
		if len(kv) > len(key) && kv[len(key)] == '=' && kv[:len(key)] == key {
			return kv[len(key)+1:]
		}
	}
	return ""
}
