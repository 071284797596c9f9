package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"dsec/client"
)

var cpCommand = command{
	name: "cp", group: groupInside, args: "SANDBOX:PATH LOCAL|-   or   LOCAL|- SANDBOX:PATH",
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
	sb, err := c.dialSandbox(ctx, *o.context, fromRef+toRef)
	if err != nil {
		return err
	}
	var n int64
	if out {
		n, err = o.download(ctx, c, &remoteFile{sb.Files(o.user), fromPath}, args[1])
	} else {
		n, err = o.upload(ctx, c, args[0], &remoteFile{sb.Files(o.user), toPath})
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
	files *client.Files
	path  string
}

// fetch copies the file's content, and tells its mode.
func (r *remoteFile) fetch(ctx context.Context, to io.Writer) (int64, fs.FileMode, error) {
	f, err := r.files.Read(ctx, r.path, client.ReadOptions{})
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	n, err := io.Copy(to, f)
	return n, f.Mode, err
}

// download copies a file to a local name.
func (o *cpOptions) download(ctx context.Context, c *console, from *remoteFile, to string) (int64, error) {
	if to == "-" {
		n, _, err := from.fetch(ctx, c.stdout)
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
		n, _, err := from.fetch(ctx, f)
		return n, errors.Join(err, f.Close())
	}
	if real, err := filepath.EvalSymlinks(to); err == nil {
		to = real
	}
	return downloadFile(ctx, from, to)
}

// downloadFile writes beside the target and renames.
func downloadFile(ctx context.Context, from *remoteFile, to string) (n int64, err error) {
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
	n, mode, err := from.fetch(ctx, f)
	if err != nil {
		return n, err
	}
	if err := f.Chmod(mode.Perm()); err != nil {
		return n, fmt.Errorf("setting the target's mode: %w", err)
	}
	if err := f.Close(); err != nil {
		return n, fmt.Errorf("writing the target: %w", err)
	}
	return n, os.Rename(f.Name(), to)
}

// upload copies a local file, or standard input, into a sandbox.
func (o *cpOptions) upload(ctx context.Context, c *console, from string, to *remoteFile) (int64, error) {
	if strings.HasSuffix(to.path, "/") {
		if from == "-" {
			return 0, usagef("standard input has no name that it could have in %s", to.path)
		}
		to.path += filepath.Base(from)
	}
	how := client.WriteOptions{Parents: o.parents, Mode: 0o644}
	if from == "-" {
		return to.files.WriteStream(ctx, to.path, client.Piped(c.stdin), how)
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
	how.Mode = info.Mode().Perm() | fs.ModeIrregular // 0000 is a mode, too
	if !info.Mode().IsRegular() {
		return to.files.WriteStream(ctx, to.path, client.Piped(f), how)
	}
	return info.Size(), to.files.Write(ctx, to.path, f, info.Size(), how)
}
