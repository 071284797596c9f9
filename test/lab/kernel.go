package main

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// packages of Debian whose one dependency is the newest kernel of a series.
var kernelPackages = map[string]string{
	"6.1":  "linux-image-cloud-amd64",
	"6.12": "linux-image-6.12-cloud-amd64",
}

// bootModules are those without which a guest does not find its disks. All else is loaded as the kernel asks for it.
var bootModules = []string{"virtio_pci", "virtio_blk", "virtio_console"}

//go:embed init.sh
var initScript []byte

// A kernel is what a guest boots.
type kernel struct{ image, initrd, modules string }

func (s store) kernel(ctx context.Context, series string) (kernel, error) {
	meta, ok := kernelPackages[series]
	if !ok {
		return kernel{}, fmt.Errorf("only 6.1 and 6.12 are known")
	}
	name, err := kernelPackage(ctx, meta)
	if err != nil {
		return kernel{}, err
	}
	dir, err := s.get("kernel", name+"-"+keyOf(string(initScript), strings.Join(bootModules, " ")), func(dir string) error {
		say("fetching %s", name)
		return makeKernel(ctx, dir, name)
	})
	say("kernel %s", name)
	return kernel{image: filepath.Join(dir, "vmlinuz"), initrd: filepath.Join(dir, "initrd"), modules: filepath.Join(dir, "modules.ext4")}, err
}

// kernelPackage is the package that meta stands for today.
func kernelPackage(ctx context.Context, meta string) (string, error) {
	out, err := command(ctx, "", "apt-cache", "depends", "--important", meta)
	if err != nil || !strings.Contains(out, "Depends:") {
		if _, err := command(ctx, "", "apt-get", "update", "-qq"); err != nil {
			return "", err
		}
		if out, err = command(ctx, "", "apt-cache", "depends", "--important", meta); err != nil {
			return "", err
		}
	}
	_, name, ok := strings.Cut(out, "Depends: ")
	if !ok {
		return "", fmt.Errorf("no package that %s depends on in %q", meta, out)
	}
	name, _, _ = strings.Cut(name, "\n")
	return strings.TrimSpace(name), nil
}

func makeKernel(ctx context.Context, dir, name string) error {
	tree := filepath.Join(dir, "tree")
	if _, err := command(ctx, dir, "apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", name); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(dir, name+"_*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("downloaded %v: %w", debs, err)
	}
	if _, err := command(ctx, "", "dpkg-deb", "-x", debs[0], tree); err != nil {
		return err
	}
	release := strings.TrimPrefix(name, "linux-image-")
	if err := os.Rename(filepath.Join(tree, "boot/vmlinuz-"+release), filepath.Join(dir, "vmlinuz")); err != nil {
		return err
	}
	if _, err := command(ctx, "", "depmod", "-b", tree, release); err != nil {
		return err
	}
	modules := filepath.Join(tree, "lib/modules")
	if err := makeInitrd(ctx, filepath.Join(dir, "initrd"), filepath.Join(modules, release)); err != nil {
		return err
	}
	if err := makeDisk(ctx, filepath.Join(dir, "modules.ext4"), modules); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(tree), os.Remove(debs[0]))
}

// makeInitrd writes an archive with busybox, the boot's modules and its script.
func makeInitrd(ctx context.Context, path, modules string) error {
	deps, err := os.ReadFile(filepath.Join(modules, "modules.dep"))
	if err != nil {
		return err
	}
	builtin, err := os.ReadFile(filepath.Join(modules, "modules.builtin"))
	if err != nil {
		return err
	}
	wanted := slices.DeleteFunc(slices.Clone(bootModules), func(name string) bool {
		return slices.ContainsFunc(strings.Fields(string(builtin)), func(file string) bool { return moduleName(file) == name })
	})
	order, err := loadOrder(string(deps), wanted)
	if err != nil {
		return err
	}
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return fmt.Errorf("the package busybox-static is needed: %w", err)
	}
	var w cpio
	for _, d := range []string{"bin", "dev", "proc", "root", "modules"} {
		w.add(d, 0o040755, nil)
	}
	w.add("bin/busybox", 0o100755, busybox)
	w.add("init", 0o100755, initScript)
	var list bytes.Buffer
	for _, m := range order {
		path, name := filepath.Join(modules, m), moduleName(m)+".ko"
		b, err := os.ReadFile(path)
		if strings.HasSuffix(m, ".xz") { // busybox does not unpack them
			var text string
			text, err = command(ctx, "", "xz", "--decompress", "--stdout", path)
			b = []byte(text)
		}
		if err != nil {
			return err
		}
		w.add("modules/"+name, 0o100644, b)
		fmt.Fprintln(&list, name)
	}
	w.add("modules/order", 0o100644, list.Bytes())
	return os.WriteFile(path, w.end(), 0o644)
}

// moduleName is how the kernel calls the module in a file.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".")
	return strings.ReplaceAll(name, "-", "_")
}

// loadOrder is the files of modules with all that they need, each after what it needs. deps is modules.dep.
func loadOrder(deps string, names []string) ([]string, error) {
	needs := map[string][]string{} // file to files, nearest first
	files := map[string]string{}   // name to file
	for line := range strings.Lines(deps) {
		file, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[file] = strings.Fields(rest)
		files[moduleName(file)] = file
	}
	var order []string
	for _, name := range names {
		file, ok := files[name]
		if !ok {
			return nil, fmt.Errorf("module %s: %w", name, fs.ErrNotExist)
		}
		all := append([]string{file}, needs[file]...)
		for _, f := range slices.Backward(all) {
			if !slices.Contains(order, f) {
				order = append(order, f)
			}
		}
	}
	return order, nil
}

// A cpio is an archive as the kernel unpacks it ("newc").
type cpio struct {
	bytes.Buffer
	inode int
}

func (c *cpio) add(name string, mode int, content []byte) {
	c.inode++
	fmt.Fprintf(c, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", c.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	c.WriteString(name + "\x00")
	c.pad()
	c.Write(content)
	c.pad()
}

func (c *cpio) pad() {
	for c.Len()%4 != 0 {
		c.WriteByte(0)
	}
}

func (c *cpio) end() []byte {
	c.add("TRAILER!!!", 0, nil)
	return c.Bytes()
}
