package sandbox

import "strings"

// A SessionSpec is what a session's shell begins with.
type SessionSpec struct {
	Name string
	Cwd  string
	User string
	Env  map[string]string
}

// Validate is the one check of a session from outside.
func (s SessionSpec) Validate() error {
	switch {
	case !ValidSessionName(s.Name):
		return Errorf(InvalidArgument, "invalid_session", "session %q: letters, digits, _ and -, at most 64", clip(s.Name))
	case s.Cwd != "" && (!strings.HasPrefix(s.Cwd, "/") || len(s.Cwd) > 4096 || strings.ContainsRune(s.Cwd, 0)):
		return Errorf(InvalidArgument, "invalid_session", "working directory %q must be an absolute path", clip(s.Cwd))
	case s.User != "" && !userSpec.MatchString(s.User):
		return Errorf(InvalidArgument, "invalid_session", "user %q is not a user name, uid, name:group or uid:gid", clip(s.User))
	case len(s.Env) > maxEnv:
		return Errorf(InvalidArgument, "invalid_session", "%d environment variables; at most %d", len(s.Env), maxEnv)
	}
	return ValidateEnv(s.Env)
}
