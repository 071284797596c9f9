// Package config is the user's file that says which platforms there are and which key opens them. The command line and
// libdsec read the same file, and `dsec up` writes it.
//
// What surprises:
//   - The file holds keys: it is written with mode 0600, atomically, and an unknown field is refused instead of being
//     lost by the next write.
//   - Under sudo a file in a user's directory stays that user's: a new file gets the owner of the one it replaces, or of
//     its directory.
//   - A key is never sent to a URL it was not stored for: DSEC_URL alone does not borrow the key of another context.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"dsec/sandbox"
)

// Environment variables that are read.
const (
	EnvPath    = "DSEC_CONFIG"  // where the file is
	EnvContext = "DSEC_CONTEXT" // which context, instead of the file's current one
	EnvURL     = "DSEC_URL"     // where the platform is; with EnvAPIKey it wins over any context
	EnvAPIKey  = "DSEC_API_KEY" // instead of the context's key
)

// maxSize bounds the file, in bytes.
const maxSize = 1 << 20

// A Config is the content of the file.
type Config struct {
	Current  string             `json:"current"` // name of the context in use, "" = none
	Contexts map[string]Context `json:"contexts"`
}

// A Context is one platform and how to enter it.
type Context struct {
	URL    string `json:"url"` // http://, https:// or unix:///path
	APIKey string `json:"api_key"`
}

var (
	contextName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$`)
	apiKey      = regexp.MustCompile(`^[\x21-\x7e]{1,512}$`)
)

// Path is where the file is: $DSEC_CONFIG, $XDG_CONFIG_HOME/dsec/config.json or ~/.config/dsec/config.json. The error says
// that none of them can be told.
func Path(getenv func(string) string) (string, error) {
	if p := getenv(EnvPath); p != "" {
		return p, nil
	}
	// The XDG specification has relative paths ignored.
	if dir := getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "dsec", "config.json"), nil
	}
	if home := getenv("HOME"); home != "" {
		return filepath.Join(home, ".config", "dsec", "config.json"), nil
	}
	return "", sandbox.Errorf(sandbox.FailedPrecondition, "no_config_path",
		"there is no place for the config file, since neither HOME nor XDG_CONFIG_HOME is set; set %s to a file", EnvPath)
}

// Load reads the file. A file that is not there is an empty Config; one that cannot be understood is an error of reason
// "bad_config" that says where.
func Load(path string) (Config, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Config{}, nil
	} else if err != nil {
		return Config{}, sandbox.Errorf(sandbox.FailedPrecondition, "unreadable_config", "reading the config file: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return Config{}, fmt.Errorf("reading the config file %s: %w", path, err)
	}
	c, err := Parse(data)
	if err != nil {
		return Config{}, sandbox.Errorf(sandbox.InvalidArgument, "bad_config", "config file %s: %v; mend it, or remove it and run `dsec up` again", path, err)
	}
	return c, nil
}

// Parse decodes the content of the file strictly.
func Parse(data []byte) (Config, error) {
	if len(data) > maxSize {
		return Config{}, fmt.Errorf("it is over %d bytes", maxSize)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var c Config
	if err := dec.Decode(&c); err != nil {
		return Config{}, decodeError(data, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Config{}, errors.New("there is something after the JSON value")
	}
	return c, c.Validate()
}

// decodeError says in which line the JSON is wrong.
func decodeError(data []byte, err error) error {
	var syntax *json.SyntaxError
	var typed *json.UnmarshalTypeError
	offset := int64(-1)
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset
	case errors.As(err, &typed):
		offset = typed.Offset
	case errors.Is(err, io.EOF):
		return errors.New("it is empty")
	}
	if offset < 0 || offset > int64(len(data)) {
		return err
	}
	return fmt.Errorf("line %d: %w", 1+bytes.Count(data[:offset], []byte("\n")), err)
}

// Validate checks names and URLs.
func (c Config) Validate() error {
	for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
		if !contextName.MatchString(name) {
			return fmt.Errorf("context name %q must be letters, digits and ._- up to 64", name)
		}
		if err := CheckURL(c.Contexts[name].URL); err != nil {
			return fmt.Errorf("context %s: %w", name, err)
		}
		if strings.ContainsAny(c.Contexts[name].APIKey, " \t\r\n\x00") {
			return fmt.Errorf("context %s: api_key holds white space", name) // never the key itself
		}
	}
	if _, ok := c.Contexts[c.Current]; !ok && c.Current != "" {
		return fmt.Errorf("the current context %q is not among the contexts", c.Current)
	}
	return nil
}

// CheckURL says whether s can be the URL of a platform.
func CheckURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return errors.New("url cannot be parsed") // the text of err repeats the URL, which may hold a password
	case u.Scheme == "unix" && u.Host == "" && filepath.IsAbs(u.Path):
		return nil
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil && u.RawQuery == "" && u.Fragment == "":
		return nil
	}
	return errors.New("url must be http://HOST:PORT, https://HOST or unix:///PATH")
}

// Save replaces the file atomically, with mode 0600. Its directory is made with mode 0700. A symbolic link is followed, so
// that a file that lives elsewhere is replaced there.
func Save(path string, c Config) error {
	if err := c.Validate(); err != nil {
		return sandbox.Errorf(sandbox.InvalidArgument, "bad_config", "config: %v", err)
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the config: %w", err)
	}
	if err := makeDir(filepath.Dir(path)); err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "unwritable_config", "making the directory of the config file: %w", err)
	}
	if err := replace(path, append(data, '\n')); err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "unwritable_config", "writing the config file: %w", err)
	}
	return nil
}

// SetContext adds or replaces one context and makes it the current one; the others stay.
func SetContext(path, name string, ctx Context) error {
	return change(path, func(c *Config) {
		c.Contexts[name] = ctx
		c.Current = name
	})
}

// RemoveContext removes one context. If it was the current one, none is. Removing what is not there is no error.
func RemoveContext(path, name string) error {
	return change(path, func(c *Config) {
		delete(c.Contexts, name)
		if c.Current == name {
			c.Current = ""
		}
	})
}

func change(path string, do func(*Config)) error {
	c, err := Load(path)
	if err != nil {
		return err
	}
	if c.Contexts == nil {
		c.Contexts = make(map[string]Context)
	}
	do(&c)
	return Save(path, c)
}

// A Target is the platform to talk to.
type Target struct {
	Context        // both fields set
	Origin  string // where it comes from, for people
}

// Resolve says which platform to talk to. name is the context that the user asked for on the command line, "" = none. The
// table is in ARCHITECTURE.md ("Which platform") and, as cases that libdsec passes too, in testdata/cases.json.
func Resolve(getenv func(string) string, name string) (Target, error) {
	if name != "" { // asked for here and now: the environment is there for every call
		c, path, err := loadDefault(getenv)
		if err != nil {
			return Target{}, err
		}
		return c.target(name, path, "")
	}
	env := Context{URL: getenv(EnvURL), APIKey: getenv(EnvAPIKey)}
	if env.URL != "" {
		if err := CheckURL(env.URL); err != nil {
			return Target{}, sandbox.Errorf(sandbox.InvalidArgument, "bad_url", "%s: %v", EnvURL, err)
		}
	}
	if env.APIKey != "" && !apiKey.MatchString(env.APIKey) {
		return Target{}, sandbox.Errorf(sandbox.Unauthenticated, "invalid_api_key", "%s holds characters that no key has (a line break at its end?)", EnvAPIKey)
	}
	if env.URL != "" && env.APIKey != "" {
		return Target{Context: env, Origin: "environment"}, nil
	}
	c, path, err := loadDefault(getenv)
	if err != nil {
		return Target{}, err
	}
	switch name = getenv(EnvContext); {
	case env.URL == "" && name == "":
		return c.current(path, env.APIKey)
	case env.URL == "":
		return c.target(name, path, env.APIKey)
	case name == "":
		return c.withURL(env.URL, path)
	}
	t, err := c.target(name, path, "")
	if err == nil && !sameURL(t.URL, env.URL) {
		return Target{}, sandbox.Errorf(sandbox.InvalidArgument, "contradiction",
			"%s is %s, but the context %s of %s is at %s; unset one of the two", EnvURL, env.URL, EnvContext, name, t.URL)
	}
	return t, err
}

func loadDefault(getenv func(string) string) (Config, string, error) {
	path, err := Path(getenv)
	if err != nil {
		return Config{}, "", err
	}
	c, err := Load(path)
	return c, path, err
}

// current is the current context, with another key if key is set.
func (c Config) current(path, key string) (Target, error) {
	switch {
	case c.Current != "":
		return c.target(c.Current, path, key)
	case len(c.Contexts) > 0:
		return Target{}, sandbox.Errorf(sandbox.FailedPrecondition, "not_configured",
			"no context is the current one in %s, which has %s: set %s, or run `dsec up` on this machine", path, c.names(), EnvContext)
	}
	return Target{}, sandbox.Errorf(sandbox.FailedPrecondition, "not_configured",
		"no platform is configured in %s: run `dsec up` on this machine, or set %s and %s; one that plain sudo started wrote to root's file: use `sudo -E dsec up`",
		path, EnvURL, EnvAPIKey)
}

// target is the context called name, with another key if key is set.
func (c Config) target(name, path, key string) (Target, error) {
	found, ok := c.Contexts[name]
	if !ok {
		return Target{}, sandbox.Errorf(sandbox.NotFound, "context_not_found", "there is no context %q in %s; it has %s", name, path, c.names())
	}
	origin := fmt.Sprintf("context %s in %s", name, path)
	if key != "" {
		found.APIKey = key
		origin += ", key of the environment"
	}
	if found.APIKey == "" {
		return Target{}, sandbox.Errorf(sandbox.Unauthenticated, "no_api_key", "context %s in %s has no api_key; add it or set %s", name, path, EnvAPIKey)
	}
	return Target{Context: found, Origin: origin}, nil
}

// withURL is a context at url, the current one before others: a key goes only where it was stored for.
func (c Config) withURL(url, path string) (Target, error) {
	for _, n := range append([]string{c.Current}, slices.Sorted(maps.Keys(c.Contexts))...) {
		if found := c.Contexts[n]; sameURL(found.URL, url) && found.APIKey != "" {
			return Target{Context: found, Origin: fmt.Sprintf("environment, key of context %s in %s", n, path)}, nil
		}
	}
	return Target{}, sandbox.Errorf(sandbox.Unauthenticated, "no_api_key",
		"%s is set but there is no key for it, neither in %s nor in %s; set %s", EnvURL, EnvAPIKey, path, EnvAPIKey)
}

func sameURL(a, b string) bool { return strings.TrimRight(a, "/") == strings.TrimRight(b, "/") }

func (c Config) names() string {
	if len(c.Contexts) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(maps.Keys(c.Contexts)), ", ")
}
