package convert

import (
	"archive/tar"
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"strings"

	"dsec/internal/image/erofs"
)

const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..opq" // what follows the prefix

	paxXattr      = "SCHILY.xattr."
	opaqueXattr   = "trusted.overlay.opaque"
	opaqueValue   = "y"
	maxXattrNames = 64 << 10 // XATTR_LIST_MAX: beyond it listxattr(2) fails
)

// attributes sets mode, owner, time and extended attributes.
func (im *importer) attributes(n *erofs.Inode, hdr *tar.Header) error {
	n.Mode |= uint16(hdr.Mode) & erofs.PermMask
	var ok [2]bool
	n.UID, ok[0] = id32(hdr.Uid)
	n.GID, ok[1] = id32(hdr.Gid)
	if !ok[0] || !ok[1] {
		return refuse(hdr.Name, "its owner %d:%d is out of range", hdr.Uid, hdr.Gid)
	}
	n.Mtime, n.Nsec = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	var err error
	n.Xattrs, err = im.xattrs(n, hdr)
	return err
}

// id32 refuses -1, which chown(2) takes for "leave it".
func id32(id int) (uint32, bool) { return uint32(id), id >= 0 && id < math.MaxUint32 }

// xattrs picks the extended attributes that a layer may have; the table is in the package's documentation.
func (im *importer) xattrs(n *erofs.Inode, hdr *tar.Header) ([]erofs.Xattr, error) {
	var xs []erofs.Xattr
	names, total := 0, 0
	for _, key := range slices.Sorted(maps.Keys(hdr.PAXRecords)) {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		x := erofs.Xattr{Name: name, Value: hdr.PAXRecords[key]}
		if hostXattr(name) {
			continue
		}
		if !keepXattr(n, x) || !erofs.ValidXattr(x) {
			im.drop("%s: extended attribute %s", hdr.Name, name)
			continue
		}
		names += len(name) + 1
		total += len(name) + len(x.Value) + 8
		if names > maxXattrNames || total > erofs.MaxXattrs {
			return nil, refuse(hdr.Name, "its extended attributes are too large")
		}
		xs = append(xs, x)
	}
	im.memory += int64(total + 32*len(xs))
	return xs, nil
}

// hostXattr reports whether an attribute only says how a tree was used on the host that it comes from. Leaving it out is
// no loss worth reporting.
func hostXattr(name string) bool {
	switch name {
	case "trusted.overlay.impure", "trusted.overlay.origin", "trusted.overlay.uuid", "security.selinux":
		return true
	}
	return false
}

func keepXattr(n *erofs.Inode, x erofs.Xattr) bool {
	switch x.Name {
	case opaqueXattr:
		return n.IsDir() && x.Value == opaqueValue
	case "security.capability":
		return n.Type() == erofs.TypeRegular
	case "system.posix_acl_access":
		return n.Type() != erofs.TypeSymlink && validACL(x.Value)
	case "system.posix_acl_default":
		return n.IsDir() && validACL(x.Value)
	}
	return strings.HasPrefix(x.Name, "user.") && (n.IsDir() || n.Type() == erofs.TypeRegular)
}

// validACL checks the form that the kernel parses: version 2, then entries of 8 bytes.
func validACL(v string) bool {
	return len(v) >= 4 && len(v)%8 == 4 && binary.LittleEndian.Uint32([]byte(v)) == 2
}

func isOpaque(n *erofs.Inode) bool {
	return slices.ContainsFunc(n.Xattrs, func(x erofs.Xattr) bool { return x.Name == opaqueXattr })
}

func setOpaque(n *erofs.Inode) {
	if !isOpaque(n) {
		n.Xattrs = append(n.Xattrs, erofs.Xattr{Name: opaqueXattr, Value: opaqueValue})
	}
}

// whiteoutInode is what overlayfs takes for "nothing is here, nor below".
func whiteoutInode() *erofs.Inode { return &erofs.Inode{Mode: erofs.TypeChar} }

func isWhiteout(n *erofs.Inode) bool { return n.Type() == erofs.TypeChar && n.Rdev == 0 }

// whiteout turns OCI's markers into overlayfs's. name is what follows ".wh.". A marker concerns the layers below only: what
// this layer itself has of that name stays.
func (im *importer) whiteout(hdr *tar.Header, dir *erofs.Inode, name string) error {
	switch {
	case name == opaqueName:
		setOpaque(dir)
		return nil
	case strings.HasPrefix(name, whiteoutPrefix): // .wh..wh.plnk and others of aufs
		im.drop("%s: marker of aufs", hdr.Name)
		return nil
	case name == "" || name == "." || name == "..":
		return refuse(hdr.Name, "it is a whiteout of nothing")
	}
	switch old := dir.Lookup(name); {
	case old == nil:
		dir.Set(name, whiteoutInode())
	case old.IsDir():
		setOpaque(old)
	}
	return nil
}
