package sandbox

// A SessionSpec is what a session's shell begins with.
type SessionSpec struct {
	Name string
	Cwd  string
	User string
	Env  map[string]string
}

// Validate is the one check of a session from outside.
func (s SessionSpec) Validate() error {
	if !ValidSessionName(s.Name) {
		return Errorf(InvalidArgument, "invalid_session", "session %q: letters, digits, _ and -, at most 64", clip(s.Name))
	}
	return validateSurroundings("invalid_session", s.User, s.Cwd, s.Env)
}
