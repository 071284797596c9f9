package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"dsec/sandbox"
)

var cpCommand = command{
	name: "cp", group: groupSandboxes, args: "SANDBOX:PATH LOCAL|-   or   LOCAL|- SANDBOX:PATH",
	summary: "copy one file out of or into a sandbox",
	details: `The target appears whole or not at all. - is our standard input or output. A local name with a colon is written ./a:b.
A PATH that ends with / is a directory, in which the file keeps its name. Mode bits are kept, owners are not.

  dsec cp s4k2:/etc/os-release .
  dsec cp -u nobody --parents patch.diff s4k2:/tmp/new/patch.diff
  tar c src | dsec cp - s4k2:/tmp/src.tar`,
	setup: setupCp,
}

type cpOptions struct {
	user    string
	parents bool
	asJSON  bool
	context *string
}

// copied is what `dsec cp --json` prints.
type copied struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes int64  `json:"bytes"`
}

func setupCp(f *flagSet) action {
	o := &cpOptions{context: contextFlag(f)}
	f.StringVar(&o.user, "user", "", "`USER` with whose rights the sandbox's file is read or written")
	f.letter("u", "user")
	f.BoolVar(&o.parents, "parents", false, "make missing directories of the target in the sandbox")
	jsonFlag(f, &o.asJSON, jsonHelp+`: {"from","to","bytes"}; not together with - as target`)
	return o.run
}

func (o *cpOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 2, 2, "source or target"); err != nil {
		return err
	}
	fromRef, fromPath, out := splitRemote(args[0])
	toRef, toPath, in := splitRemote(args[1])
	if out == in {
		return usagef("exactly one of source and target must be SANDBOX:PATH")
	}
	if out && args[1] == "-" && o.asJSON {
		return usagef("--json and - both want standard output")
	}
	cl, err := c.dial(*o.context)
	if err != nil {
		return err
	}
	id, err := cl.resolve(ctx, fromRef+toRef)
	if err != nil {
		return err
	}
	var n int64
	if out {
		n, err = o.download(ctx, c, cl, &remoteFile{id, fromPath, o.user}, args[1])
	} else {
		n, err = o.upload(ctx, c, cl, args[0], &remoteFile{id, toPath, o.user})
	}
	if err != nil || !o.asJSON {
		return err
	}
	return c.printJSON(copied{args[0], args[1], n})
}

// splitRemote takes SANDBOX:PATH apart. Local names have no colon, or a slash before it.
func splitRemote(s string) (ref, path string, ok bool) {
	ref, path, ok = strings.Cut(s, ":")
	if !ok || ref == "" || strings.Contains(ref, "/") {
		return "", "", false
	}
	return ref, path, true
}

// A remoteFile is a file in a sandbox.
type remoteFile struct {
	sandboxID, path, user string
}

func (r *remoteFile) query() url.Values {
	q := url.Values{"path": {r.path}}
	if r.user != "" {
		q.Set("user", r.user)
	}
	return q
}

// download copies a file to a local name.
func (o *cpOptions) download(ctx context.Context, c *console, cl *client, from *remoteFile, to string) (int64, error) {
	if to == "-" {
		n, _, err := cl.fetch(ctx, from, c.stdout)
		return n, err
	}
	info, err := os.Stat(to)
	switch {
	case err == nil && info.IsDir(), strings.HasSuffix(to, "/"):
		base := path.Base(path.Clean("/" + from.path))
		if base == "/" {
			return 0, usagef("%q has no file name", from.path)
		}
		to = filepath.Join(to, base)
	case err == nil && !info.Mode().IsRegular(): // a device or pipe is written, not replaced
		f, err := os.OpenFile(to, os.O_WRONLY, 0)
		if err != nil {
			return 0, err
		}
		n, _, err := cl.fetch(ctx, from, f)
		return n, errors.Join(err, f.Close())
	}
	if real, err := filepath.EvalSymlinks(to); err == nil {
		to = real
	}
	return downloadFile(ctx, cl, from, to)
}

// downloadFile writes beside the target and renames.
func downloadFile(ctx context.Context, cl *client, from *remoteFile, to string) (n int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(to), ".dsec-cp-*")
	if err != nil {
		return 0, fmt.Errorf("making the target: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	n, mode, err := cl.fetch(ctx, from, f)
	if err != nil {
		return n, err
	}
	if err := f.Chmod(mode); err != nil {
		return n, fmt.Errorf("setting the target's mode: %w", err)
	}
	if err := f.Close(); err != nil {
		return n, fmt.Errorf("writing the target: %w", err)
	}
	return n, os.Rename(f.Name(), to)
}

// fetch copies a file's content. After a lost connection it goes on where it was, unless the file has changed. mode has
// permission bits only: nothing from a sandbox becomes setuid here.
func (cl *client) fetch(ctx context.Context, from *remoteFile, to io.Writer) (n int64, mode fs.FileMode, err error) {
	var o outage
	version := ""
	for {
		got, header, err := cl.fetchOnce(ctx, from, n, version, to)
		n += got
		if header != nil {
			version, mode = fileVersion(header), fileMode(header)
		}
		if got > 0 {
			o.over()
		}
		var failed *writeError
		if err == nil || errors.As(err, &failed) {
			return n, mode, err
		}
		if err := cl.wait(ctx, &o, err); err != nil {
			return n, mode, err
		}
	}
}

func (cl *client) fetchOnce(ctx context.Context, from *remoteFile, offset int64, version string, to io.Writer) (int64, http.Header, error) {
	q := from.query()
	if offset > 0 {
		q.Set("offset", strconv.FormatInt(offset, 10))
	}
	res, err := cl.request(ctx, http.MethodGet, filesPath(from.sandboxID), q, nil, nil)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	if version != "" && fileVersion(res.Header) != version {
		return 0, nil, sandbox.Errorf(sandbox.FailedPrecondition, "file_changed", "%s changed while it was copied; copy it again", clipText(from.path))
	}
	n, err := copyBytes(to, res.Body)
	return n, res.Header, err
}

func fileVersion(h http.Header) string { return "mtime " + h.Get("Dsec-Mtime") }

func fileMode(h http.Header) fs.FileMode {
	m, err := strconv.ParseUint(h.Get("Dsec-Mode"), 8, 32)
	if err != nil {
		return 0o644
	}
	return fs.FileMode(m) & fs.ModePerm
}

// upload copies a local file, or standard input, into a sandbox.
func (o *cpOptions) upload(ctx context.Context, c *console, cl *client, from string, to *remoteFile) (int64, error) {
	if strings.HasSuffix(to.path, "/") {
		if from == "-" {
			return 0, usagef("standard input has no name that it could have in %s", to.path)
		}
		to.path += filepath.Base(from)
	}
	q := to.query()
	if o.parents {
		q.Set("parents", "1")
	}
	if from == "-" {
		q.Set("mode", "0644")
		return cl.put(ctx, to, q, piped(c.stdin), -1, nil) // read once, so it cannot be sent twice
	}
	f, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if info.IsDir() {
		return 0, usagef("%s is a directory; copy it as an archive: tar c %s | dsec exec -i SANDBOX tar x -C DIR", from, from)
	}
	q.Set("mode", fmt.Sprintf("%04o", info.Mode().Perm()))
	if !info.Mode().IsRegular() {
		return cl.put(ctx, to, q, piped(f), -1, nil)
	}
	sum := sha256.New()
	size, err := io.Copy(sum, f)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", from, err)
	}
	header := http.Header{"Dsec-Sha256": {hex.EncodeToString(sum.Sum(nil))}}
	return call(ctx, cl, func(ctx context.Context) (int64, error) {
		return cl.put(ctx, to, q, io.NewSectionReader(f, 0, size), size, header)
	})
}

// put sends a body of size bytes, or of unknown length if size is negative.
func (cl *client) put(ctx context.Context, to *remoteFile, q url.Values, body io.Reader, size int64, header http.Header) (int64, error) {
	source := &source{r: body}
	res, err := cl.send(ctx, http.MethodPut, filesPath(to.sandboxID), q, source, size, header)
	if err != nil {
		return source.n.Load(), err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(res.Body, maxErrorBody))
	return source.n.Load(), err
}
