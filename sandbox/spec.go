package sandbox

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits of one sandbox. All are hard. Zero values in a request mean the default.
type Limits struct {
	Memory int64   // bytes
	CPU    float64 // cores: a weight, and a cap where it is below the node's CPUs
	PIDs   int64
	Disk   int64 // bytes of the writable layer
	Inodes int64 `json:",omitempty"` // of the writable layer; 0 = as many as Disk has room for

	NetworkRate        int64 `json:",omitempty"` // bytes per second to the outside, and as many from there; 0 = no cap
	NetworkConnections int64 `json:",omitempty"` // to the outside at a time
}

// A Spec is what somebody asks for. Names of environments are as given in a request and pinned ("name:tag@sha256:…")
// once the control plane has looked them up.
type Spec struct {
	Backend     string
	Image       string
	Workspace   string
	Toolkits    []string
	Limits      Limits
	IdleTimeout time.Duration
	Lifetime    time.Duration
	Labels      map[string]string
	Env         map[string]string
	User        string
	Workdir     string
	Network     map[string]bool
	Hostname    string
	Name        string
	Start       *Command `json:",omitempty"` // started once aether answers, as StartCommand
	ReadyWhen   *Probe   `json:",omitempty"` // it is not ready before this has succeeded
}

// Defaults and bounds of a Spec.
const (
	BackendContainer = "container"

	DefaultMemory      = 2 << 30
	MinMemory          = 16 << 20
	MaxMemory          = 16 << 40
	DefaultCPU         = 1.0
	MinCPU             = 0.01
	MaxCPU             = 4096
	DefaultPIDs        = 4096
	MinPIDs            = 8
	MaxPIDs            = 4 << 20
	DefaultDisk        = 10 << 30
	MinDisk            = 1 << 20
	MaxDisk            = 16 << 40
	MinInodes          = 64
	MaxInodes          = 1 << 40
	MinNetworkRate     = 1 << 10
	MaxNetworkRate     = 1 << 40
	DefaultConnections = 1024
	MaxConnections     = 64 << 10
	DefaultIdleTimeout = time.Hour
	DefaultLifetime    = 24 * time.Hour
	MaxLifetime        = 30 * 24 * time.Hour

	maxLabels   = 64
	maxEnv      = 1024
	maxToolkits = 32
)

// WithDefaults fills in what was left out. It does not change s's maps.
func (s Spec) WithDefaults() Spec {
	setDefault(&s.Backend, BackendContainer)
	setDefault(&s.Limits.Memory, DefaultMemory)
	setDefault(&s.Limits.CPU, DefaultCPU)
	setDefault(&s.Limits.PIDs, DefaultPIDs)
	setDefault(&s.Limits.Disk, DefaultDisk)
	setDefault(&s.Limits.NetworkConnections, DefaultConnections)
	setDefault(&s.IdleTimeout, DefaultIdleTimeout)
	setDefault(&s.Lifetime, DefaultLifetime)
	if s.ReadyWhen != nil {
		s.ReadyWhen = s.ReadyWhen.withDefaults()
	}
	return s
}

func setDefault[T comparable](p *T, d T) {
	var zero T
	if *p == zero {
		*p = d
	}
}

// Clone copies s deeply.
func (s Spec) Clone() Spec {
	s.Toolkits = slices.Clone(s.Toolkits)
	s.Labels = maps.Clone(s.Labels)
	s.Env = maps.Clone(s.Env)
	s.Network = maps.Clone(s.Network)
	return s
}

var (
	labelKey   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,126}[a-zA-Z0-9])?$`)
	envKey     = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	hostname   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,61}[a-zA-Z0-9])?$`)
	userSpec   = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9_.@-]{0,63}\$?(:[a-zA-Z0-9_][a-zA-Z0-9_.@-]{0,63})?$`)
	envName    = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	envTag     = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}$`)
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// Validate is the one check of a request with its defaults filled in, before anything is looked up.
func (s Spec) Validate() error {
	bad := func(format string, args ...any) error {
		return Errorf(InvalidArgument, "invalid_spec", format, args...)
	}
	switch {
	case s.Backend != BackendContainer:
		return Errorf(Unsupported, "unknown_backend", "backend %q is not offered here; this version has %q", clip(s.Backend), BackendContainer)
	case s.Image == "":
		return bad("an image is required: name one that `dsec image ls` lists")
	case len(s.Toolkits) > maxToolkits:
		return bad("%d toolkits; at most %d", len(s.Toolkits), maxToolkits)
	case s.Limits.Memory < MinMemory || s.Limits.Memory > MaxMemory:
		return bad("memory limit of %d bytes; it must be between 16 MiB and 16 TiB", s.Limits.Memory)
	case !(s.Limits.CPU >= MinCPU && s.Limits.CPU <= MaxCPU): // also false for NaN
		return bad("cpu limit of %v cores; it must be between %v and %v", s.Limits.CPU, MinCPU, MaxCPU)
	case s.Limits.PIDs < MinPIDs || s.Limits.PIDs > MaxPIDs:
		return bad("limit of %d pids; it must be between %d and %d", s.Limits.PIDs, MinPIDs, MaxPIDs)
	case s.Limits.Disk < MinDisk || s.Limits.Disk > MaxDisk:
		return bad("disk limit of %d bytes; it must be between 1 MiB and 16 TiB", s.Limits.Disk)
	case s.Limits.Inodes != 0 && (s.Limits.Inodes < MinInodes || s.Limits.Inodes > MaxInodes):
		return bad("limit of %d inodes; it must be at least %d", s.Limits.Inodes, MinInodes)
	case s.Limits.NetworkRate != 0 && (s.Limits.NetworkRate < MinNetworkRate || s.Limits.NetworkRate > MaxNetworkRate):
		return bad("network limit of %d bytes per second; it must be between 1 KiB and 1 TiB", s.Limits.NetworkRate)
	case s.Limits.NetworkConnections < 1 || s.Limits.NetworkConnections > MaxConnections:
		return bad("limit of %d network connections; it must be between 1 and %d", s.Limits.NetworkConnections, MaxConnections)
	case s.IdleTimeout <= 0:
		return bad("idle timeout (ttl_running_stop) must be greater than 0")
	case s.Lifetime <= 0:
		return bad("lifetime must be greater than 0")
	case s.Lifetime > MaxLifetime || s.IdleTimeout > MaxLifetime:
		return bad("idle timeout and lifetime may be at most %v", MaxLifetime)
	case s.Hostname != "" && !hostname.MatchString(s.Hostname):
		return bad("host name %q is not valid", clip(s.Hostname))
	case len(s.Name) > 128 || !utf8.ValidString(s.Name):
		return bad("name must be valid UTF-8 of at most 128 bytes")
	case len(s.Labels) > maxLabels:
		return bad("%d labels; at most %d", len(s.Labels), maxLabels)
	}
	for k, v := range s.Labels {
		if !labelKey.MatchString(k) || len(v) > 256 || !utf8.ValidString(v) {
			return bad("label %q: keys are letters, digits and ._/- up to 128, values UTF-8 up to 256 bytes", clip(k))
		}
	}
	if err := validateSurroundings("invalid_spec", s.User, s.Workdir, s.Env); err != nil {
		return err
	}
	if err := s.validateStart(); err != nil {
		return err
	}
	return ValidateNetworkRules(s.Network)
}

// maxEnvString is the kernel's bound of one string of a program's environment: "NAME=VALUE" and its NUL.
const maxEnvString = 128 << 10

// validateSurroundings is the one check of with whose rights, where and with which environment something shall run.
func validateSurroundings(reason, user, workdir string, env map[string]string) error {
	switch {
	case user != "" && !userSpec.MatchString(user):
		return Errorf(InvalidArgument, reason, "user %q is not a user name, uid, name:group or uid:gid", clip(user))
	case workdir != "" && (!strings.HasPrefix(workdir, "/") || len(workdir) > 4096 || strings.ContainsRune(workdir, 0)):
		return Errorf(InvalidArgument, reason, "working directory %q must be an absolute path", clip(workdir))
	case len(env) > maxEnv:
		return Errorf(InvalidArgument, reason, "%d environment variables; at most %d", len(env), maxEnv)
	}
	return validateEnv(env)
}

// validateEnv checks environment variables.
func validateEnv(env map[string]string) error {
	for k, v := range env {
		if !envKey.MatchString(k) || len(k) > 256 {
			return Errorf(InvalidArgument, "invalid_env", "%q is not a name of an environment variable", clip(k))
		}
		if strings.ContainsRune(v, 0) || len(k)+len("=")+len(v)+1 > maxEnvString {
			return Errorf(InvalidArgument, "invalid_env", "environment variable %s holds a NUL or is, with its name, longer than the kernel's 128 KiB", k)
		}
	}
	return nil
}

// An EnvRef names an environment: by tag, or pinned by the digest of its manifest. A pinned one may keep the tag it was found
// by, for people: only the digest counts.
type EnvRef struct {
	Name   string
	Tag    string // may be "" if Digest is set
	Digest string // "sha256:<hex>"
}

func (r EnvRef) String() string {
	s := r.Name
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Digest != "" {
		s += "@" + r.Digest
	}
	return s
}

// ParseEnvRef parses "name", "name:tag", "name@sha256:…" and "name:tag@sha256:…". The tag is "latest" where neither tag nor
// digest is given. A name that tries to be a path does not parse.
func ParseEnvRef(s string) (EnvRef, error) {
	rest, digest, pinned := strings.Cut(s, "@")
	name, tag, tagged := strings.Cut(rest, ":")
	if !tagged && !pinned {
		tag, tagged = "latest", true
	}
	switch {
	case len(name) > 255 || !envName.MatchString(name), tagged && !envTag.MatchString(tag), pinned && !digestForm.MatchString(digest):
		return EnvRef{}, Errorf(InvalidArgument, "invalid_name",
			"%q is not a name of an environment; write name:tag (lower case letters, digits, ._-/) or name@sha256:<64 hex digits>", clip(s))
	}
	return EnvRef{Name: name, Tag: tag, Digest: digest}, nil
}
