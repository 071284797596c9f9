package guest

import (
	"context"
	"fmt"
	"net"
	"slices"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// Grounds are what aether needs for trusted commands.
type Grounds struct {
	Freeze string   // control file that stops the user part
	Group  string   // v2 directory, owned by the sandbox's root
	Tasks  []string // v1 tasks files
	Tools  int      // descriptor of the directory of tools; it stays the caller's
}

// Trust hands them over. To do it again is harmless: aether keeps what it has.
func (c *Client) Trust(ctx context.Context, g Grounds) error {
	files, err := g.open()
	defer func() { linux.Close(files...) }()
	if err != nil {
		return fmt.Errorf("open what trusted commands need: %w", err)
	}
	nc, err := c.o.Dial(ctx)
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "guest_disconnected", "the sandbox cannot be reached; try again").WithCause(err)
	}
	uc, ok := nc.(*net.UnixConn)
	if !ok {
		_ = nc.Close()
		return sandbox.Errorf(sandbox.Unsupported, "no_trusted_tools", "sandboxes of this backend run no trusted commands")
	}
	sent := slices.Insert(slices.Clone(files), 2, g.Tools)
	l := newLink(c, &giver{Conn: uc, socket: uc, files: sent})
	defer l.close()
	_, err = l.sendHello(ctx, &aetherv1.Grounds{V1Tasks: uint32(len(g.Tasks))})
	return err
}

// open gives the descriptors in aether's order, but for the tools. What it has opened when it fails is the caller's to close.
func (g Grounds) open() (files []int, err error) {
	add := func(fd int, err error) error {
		if err == nil {
			files = append(files, fd)
		}
		return err
	}
	if err := add(linux.OpenWrite(g.Freeze)); err != nil {
		return files, err
	}
	// A mount of its own: see the driver, which hands over the user part's alike.
	group, err := linux.CloneMountWith(g.Group, linux.MountAttr{Set: linux.MountNoSUID | linux.MountNoDev | linux.MountNoExec})
	if err := add(group, err); err != nil {
		return files, err
	}
	for _, path := range g.Tasks {
		if err := add(linux.OpenWrite(path)); err != nil {
			return files, err
		}
	}
	return files, nil
}

// A giver sends descriptors along with the first bytes. It has none of a socket's other methods: each write must come by here.
type giver struct {
	net.Conn
	socket *net.UnixConn
	files  []int
}

func (g *giver) Write(b []byte) (int, error) {
	if g.files == nil || len(b) == 0 {
		return g.Conn.Write(b)
	}
	n, err := linux.SendFiles(g.socket, b, g.files)
	if n > 0 {
		g.files = nil
	}
	return n, err
}
